"""A server under load whose processes are killed by SIGKILL: how every call ended, and who serves again."""
