// Calls discover_tools through the official TypeScript SDK, version 1, and prints the result as JSON.
//
//     node sdk_v1.mjs MODULES URL ARGUMENTS
//
// `tools/list` comes first: the SDK then holds structured content against the tool's output schema, also
// that of error results, and throws where it does not fit.
import { pathToFileURL } from "node:url";

const [modules, url, callArguments] = process.argv.slice(2);
const sdk = (path) => import(pathToFileURL(`${modules}/@modelcontextprotocol/sdk/dist/esm/client/${path}`));
const { Client } = await sdk("index.js");
const { StreamableHTTPClientTransport } = await sdk("streamableHttp.js");

const client = new Client({ name: "test", version: "1" });
await client.connect(new StreamableHTTPClientTransport(new URL(url)));
const { tools } = await client.listTools();
const result = await client.callTool({ name: "discover_tools", arguments: JSON.parse(callArguments) });
console.log(JSON.stringify({ outputSchema: tools[0].outputSchema, result }));
await client.close();
