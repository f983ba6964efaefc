"""The engine beside vLLM and transformers: 700 tokens in, 12 out, greedy, every request offered at once.

    python -m benchmarks.generate_peers --model GGUF --out FILE [--only ours vllm transformers]

Each runs in a process of its own, one after the other on the same card, over the same weights in
bfloat16 and the same prompts: random tokens of the whole vocabulary, none of which share a prefix. A
few requests of the same shape go first and are not counted. Memory is the card's, by NVML, from before
the process starts until it has ended. One that fails is reported by a sentence in the result, and its
output is beside the result file.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import queue
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from benchmarks.report import Target, write

PROMPT, OUTPUT = 700, 12
STEP_TOKENS = 8192  # most new tokens in a step of the peers
BLOCK_TOKENS = 256  # of transformers' cache, its default
WARM = 128  # requests before those that count
PEERS = ("ours", "vllm", "transformers")
MORE_MEMORY = (1.0, 1.5, 2.0)  # times what vLLM is given, until it starts
GIVEN_BACK_MIB = 32  # a card within this of what it held before is as it was
CONTEXT_MIB = 1024  # of what transformers is given, for the CUDA context, weights and activations

Tokens = tuple[int, ...]
Ended = list[tuple[int, Tokens]]  # index of the prompt, tokens generated


@dataclass(frozen=True, slots=True)
class Setting:
    """What a peer is started with. `memory_mib` is what vLLM and transformers are given."""

    gguf: Path
    folder: Path
    device: str
    memory_mib: float
    requests: int


class Peer(Protocol):
    def offer(self, prompts: Sequence[list[int]]) -> None:
        """Asks for OUTPUT tokens after each prompt, whatever tokens come."""
        ...

    def ended(self) -> Iterator[Ended]:
        """What has ended since the last time, as often as it is known, be it nothing."""
        ...

    def close(self) -> None: ...


class Ours:
    def __init__(self, setting: Setting) -> None:
        from engine import Engine, EngineConfig
        from mcp_discovery.tuning import tune_interpreter

        waiting = max(setting.requests, WARM)
        config = EngineConfig(
            device="cuda" if setting.device == "cuda" else "cpu",
            max_queue=waiting,
            max_queued_tokens=waiting * PROMPT,
        )
        self._ended: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._engine = Engine.create(config, setting.gguf)
        tune_interpreter()  # as the server does

    def offer(self, prompts: Sequence[list[int]]) -> None:
        from engine import Generate

        for index, prompt in enumerate(prompts):
            self._engine.submit(Generate(tuple(prompt), OUTPUT), on_done=partial(self._done, index))

    def _done(self, index: int, outcome: object) -> None:
        self._ended.put((index, outcome))

    def ended(self) -> Iterator[Ended]:
        while True:
            batch: Ended = []
            try:
                batch.append(self._tokens(*self._ended.get(timeout=0.1)))
                while True:
                    batch.append(self._tokens(*self._ended.get_nowait()))
            except queue.Empty:
                yield batch

    @staticmethod
    def _tokens(index: int, outcome: object) -> tuple[int, Tokens]:
        from engine import Generated

        if not isinstance(outcome, Generated):
            raise RuntimeError(f"request {index} ended as {outcome}")
        return index, outcome.tokens

    def close(self) -> None:
        self._engine.close()


class VLLM:
    """Its defaults for offline use, but for the memory, the step and its rows, and the prefix cache."""

    def __init__(self, setting: Setting) -> None:
        from engine.cuda.nvml import read_card

        vllm: Any = importlib.import_module("vllm")
        llm = vllm.LLM(
            model=str(setting.folder),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=1024,
            gpu_memory_utilization=setting.memory_mib * 2**20 / read_card().total,
            enable_prefix_caching=False,
            max_num_batched_tokens=STEP_TOKENS,
            max_num_seqs=256,
            attention_backend="FLASH_ATTN",
        )
        self._engine = llm.llm_engine
        self._parameters = vllm.SamplingParams(
            temperature=0.0,
            max_tokens=OUTPUT,
            ignore_eos=True,
            detokenize=False,
            output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )

    def offer(self, prompts: Sequence[list[int]]) -> None:
        for index, prompt in enumerate(prompts):
            self._engine.add_request(str(index), {"prompt_token_ids": prompt}, self._parameters)

    def ended(self) -> Iterator[Ended]:
        while True:
            outputs = [output for output in self._engine.step() if output.finished]
            yield [(int(output.request_id), tuple(output.outputs[0].token_ids)) for output in outputs]

    def close(self) -> None:
        self._engine.engine_core.shutdown()


class Transformers:
    """Continuous batching over `paged|sdpa`, the attention that needs no further package."""

    def __init__(self, setting: Setting) -> None:
        import torch

        transformers: Any = importlib.import_module("transformers")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            setting.folder, dtype=torch.bfloat16, attn_implementation="paged|sdpa"
        ).to(setting.device)
        self._manager = model.requires_grad_(False).init_continuous_batching(
            generation_config=transformers.GenerationConfig(
                max_new_tokens=OUTPUT, do_sample=False, eos_token_id=-1
            ),
            continuous_batching_config=transformers.ContinuousBatchingConfig(
                allow_block_sharing=False, **_cache_share(setting)
            ),
        )
        self._manager.warmup()
        self._manager.start()
        self._indices: dict[str, int] = {}

    def offer(self, prompts: Sequence[list[int]]) -> None:
        names = self._manager.add_requests(inputs=list(prompts), max_new_tokens=OUTPUT)
        self._indices = {name: index for index, name in enumerate(names)}

    def ended(self) -> Iterator[Ended]:
        while True:
            result = self._manager.get_result(timeout=0.1)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError("the generation thread has ended early")
                yield []
            elif result.error is not None:
                raise RuntimeError(f"{result.request_id} ended as {result.error}")
            elif result.is_finished():
                yield [(self._indices[result.request_id], tuple(result.generated_tokens))]

    def close(self) -> None:
        self._manager.stop(block=True, timeout=10, hard_stop=True)


def _cache_share(setting: Setting) -> dict[str, Any]:
    """On a card the share that transformers may fill; on the CPU a cache of a few requests."""
    if setting.device == "cpu":
        return {"num_blocks": 64, "max_batch_tokens": 1024}
    from engine.cuda.nvml import read_card

    cache_mib = max(setting.memory_mib - CONTEXT_MIB, 256)
    return {"max_memory_percent": cache_mib * 2**20 / read_card().total}


KINDS: dict[str, Callable[[Setting], Peer]] = {"ours": Ours, "vllm": VLLM, "transformers": Transformers}


def make_prompts(count: int, vocabulary: int, seed: int) -> list[list[int]]:
    """`count` prompts of PROMPT random tokens that differ in their first token or soon after."""
    source = random.Random(seed)
    return [source.choices(range(vocabulary), k=PROMPT) for _ in range(count)]


def race(peer: Peer, prompts: Sequence[list[int]], limit_s: float) -> tuple[list[float], dict[int, Tokens]]:
    """Seconds from the first offer to each end, and the tokens by prompt; of those that end in `limit_s`.

    Raises RuntimeError where one ends with another number of tokens than asked for.
    """
    began = time.perf_counter()
    peer.offer(prompts)
    times: list[float] = []
    answers: dict[int, Tokens] = {}
    for batch in peer.ended():
        now = time.perf_counter() - began
        times += [now] * len(batch)
        answers |= dict(batch)
        if len(times) >= len(prompts) or now > limit_s:
            break
    if odd := [index for index, tokens in answers.items() if len(tokens) != OUTPUT]:
        raise RuntimeError(f"request {odd[0]} ended with {len(answers[odd[0]])} tokens, not {OUTPUT}")
    return times, answers


def rates(times: Sequence[float]) -> dict[str, float | None]:
    """Requests a second: overall, and from the first quarter of the ends to the last tenth.

    Requests end in groups, so the group that the steady part begins with is left out and the one that
    it ends with counted whole. No steady rate where all end at once.
    """
    if not times:
        raise RuntimeError("no request has ended in the time given")
    first, last = times[len(times) // 4], times[len(times) * 9 // 10]
    inside = bisect_right(times, last) - bisect_right(times, first)
    return {
        "overall_requests_per_s": round(len(times) / times[-1], 1),
        "steady_requests_per_s": round(inside / (last - first), 1) if last > first else None,
    }


def run_child(name: str, setting: Setting, limit_s: float, out: Path) -> None:
    """Starts a peer, measures it and writes `out`; what fails ends the process with a traceback."""
    vocabulary = json.loads((setting.folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    warm, prompts = (make_prompts(n, vocabulary, seed) for seed, n in enumerate((WARM, setting.requests)))
    began = time.perf_counter()
    peer = KINDS[name](setting)
    ready_s = time.perf_counter() - began
    race(peer, warm[: setting.requests], limit_s)
    times, answers = race(peer, prompts, limit_s)
    found = {
        "version": None if name == "ours" else version(name),
        "ready_s": round(ready_s, 1),
        "requests": len(times),
        "seconds": round(times[-1], 3) if times else None,
        **rates(times),
        "first_tokens": {str(index): answers[index][0] for index in sorted(answers)},
    }
    out.write_text(json.dumps(found), encoding="utf-8")
    peer.close()


def write_folder(gguf: Path, folder: Path) -> Path:
    """The weights of a Llama GGUF in bfloat16 as a safetensors folder, as published models have it."""
    import torch
    from safetensors.torch import save_file

    from engine.weights import load_weights

    shape, weights = load_weights(gguf, torch.bfloat16, torch.device("cpu"))
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tensors = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.final_norm}
    if not shape.tied_embeddings:
        tensors["lm_head.weight"] = weights.head
    for index, layer in enumerate(weights.layers):
        q, k, v = torch.tensor_split(layer.qkv, (queries, queries + keys))
        gate, up = layer.gate_up.chunk(2)
        parts = {
            "input_layernorm": layer.attention_norm,
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer.o,
            "post_attention_layernorm": layer.mlp_norm,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down,
        }
        tensors |= {f"model.layers.{index}.{part}.weight": tensor for part, tensor in parts.items()}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": shape.architecture,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.context,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tied_embeddings,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "bfloat16",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    cloned = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(cloned, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def child_environment(name: str, vllm_site: Path | None) -> dict[str, str]:
    """The parent's, and for vLLM its own packages in place of ours, without the network."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    if name == "vllm":
        environment |= {
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",  # greedy samples nothing, so FlashInfer is not needed
            "VLLM_DISABLE_COMPILE_CACHE": "1",
        }
        if vllm_site is not None:
            environment["PYTHONPATH"] = os.pathsep.join([str(vllm_site.resolve()), os.getcwd()])
    return environment


def failure(name: str, log: str, code: int | None, timeout_s: float) -> str:
    """A sentence of why a child has left no result; `code` is None where it took too long."""
    if code is None:
        return f"{name} had not ended after {timeout_s:g} s"
    told = re.findall(r"\b((?:\w+\.)*\w*(?:Error|Exception|ModuleNotFound): .+)", log)
    root = [line for line in told if "initialization failed" not in line] or told
    lines = log.strip().splitlines() or ["it said nothing"]
    return f"{name} ended with exit code {code}: {(root or lines[-1:])[0].strip()[:400]}"


def run_peer(name: str, setting: Setting, given: argparse.Namespace, log: Path) -> dict[str, Any]:
    """Runs `name` in a process of its own. Its results, or `failed` with a sentence."""
    result = log.with_suffix(".json.part")
    command = [sys.executable, "-m", "benchmarks.generate_peers", "--child", name]
    for flag, value in (
        ("--model", setting.gguf),
        ("--folder", setting.folder),
        ("--device", setting.device),
        ("--memory-mib", setting.memory_mib),
        ("--requests", setting.requests),
        ("--limit-s", given.limit_s),
        ("--out", result),
    ):
        command += [flag, str(value)]
    card = Card() if setting.device == "cuda" else None
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=child_environment(name, given.vllm_site),
            start_new_session=True,
        )
        code = _wait(child, given.timeout_s)
    found: dict[str, Any] = {}
    if result.exists():
        found = json.loads(result.read_text(encoding="utf-8"))
        result.unlink()
    else:
        text = log.read_text(encoding="utf-8", errors="replace")
        found["failed"] = failure(name, text, code, given.timeout_s)
    if card is not None:
        found["nvml_peak_mib"] = card.close()
    return found


def _wait(child: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """The exit code, None where it took too long; whatever it has started is ended with it."""
    try:
        return child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


class Card:
    """What the card holds beyond what it held before."""

    def __init__(self) -> None:
        from benchmarks.engine import CardSampler
        from engine.cuda.nvml import read_card

        self._read = read_card
        self._before = read_card().used
        self._sampler = CardSampler()

    def close(self) -> float:
        """The peak in MiB. Waits for the memory to come back: what is killed gives it back a little later."""
        until = time.monotonic() + 10
        while self._read().used > self._before + GIVEN_BACK_MIB * 2**20 and time.monotonic() < until:
            time.sleep(0.1)
        return round(self._sampler.close() / 2**20, 1)


def run_vllm(setting: Setting, given: argparse.Namespace, log: Path) -> dict[str, Any]:
    """vLLM in the memory asked for, or in the least of MORE_MEMORY that it starts with."""
    refused: list[str] = []
    found: dict[str, Any] = {}
    for times in MORE_MEMORY:
        memory_mib = setting.memory_mib * times
        larger = Setting(setting.gguf, setting.folder, setting.device, memory_mib, setting.requests)
        found = run_peer("vllm", larger, given, log) | {"given_mib": memory_mib}
        if "memory" not in found.get("failed", "").lower():
            break
        refused.append(found["failed"])
    return found | {"refused_with_less": refused}


def compare(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each peer with the share of its first tokens that equal ours, that all do the same work, in place
    of the tokens."""
    ours = results.get("ours", {}).get("first_tokens", {})
    compared: dict[str, dict[str, Any]] = {}
    for name, found in results.items():
        theirs = found.get("first_tokens", {})
        compared[name] = {key: value for key, value in found.items() if key != "first_tokens"}
        if name != "ours" and (both := ours.keys() & theirs.keys()):
            same = sum(ours[index] == theirs[index] for index in both)
            compared[name]["first_tokens_as_ours"] = round(same / len(both), 4)
    return compared


def targets(results: dict[str, dict[str, Any]]) -> list[Target]:
    rate = "steady_requests_per_s"
    ours, theirs = (results.get(name, {}).get(rate) for name in ("ours", "vllm"))
    found = []
    if ours and theirs:
        found.append(Target("engine.generate_700_12_ratio_to_vllm", ours / theirs, "at least"))
    if ours and "nvml_peak_mib" in results["ours"]:
        found.append(Target("memory.allowance_mib", results["ours"]["nvml_peak_mib"], "at most"))
    return found


def compete(given: argparse.Namespace) -> None:
    """Runs the peers asked for, one after the other. The result file is written after each, so that an
    early end leaves what was measured."""
    given.out.parent.mkdir(parents=True, exist_ok=True)
    shape = {"prompt_tokens": PROMPT, "output_tokens": OUTPUT, "offered": given.requests}
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_folder(given.model, Path(temporary) / "model")
        setting = Setting(given.model, folder, given.device, given.memory_mib, given.requests)
        for name in given.only:
            log = given.out.with_suffix(f".{name}.log")
            if name == "vllm":
                results[name] = run_vllm(setting, given, log)
            else:
                results[name] = run_peer(name, setting, given, log)
            compared = compare(results)
            print(f"{name}: {compared[name]}", flush=True)
            write("generate_peers", {"shape": shape} | compared, targets(compared), out=given.out)


def arguments(line: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--memory-mib", type=float, default=4023.0, help="given to vLLM and transformers")
    parser.add_argument("--limit-s", type=float, default=60.0, help="most seconds of measuring one")
    parser.add_argument("--timeout-s", type=float, default=240.0, help="most seconds of one, start included")
    parser.add_argument("--vllm-site", type=Path, help="folder of vLLM's packages, where not installed")
    parser.add_argument("--child", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(line)
    if given.requests < 1:
        parser.error("--requests must be at least 1")
    return given


def main() -> None:
    given = arguments()
    if given.child is None:
        compete(given)
        return
    setting = Setting(given.model, given.folder, given.device, given.memory_mib, given.requests)
    run_child(given.child, setting, given.limit_s, given.out)


if __name__ == "__main__":
    main()
