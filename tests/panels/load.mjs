// Loads the panels' drawing code for tests in node, without a browser.

import { readFileSync } from "node:fs";
import vm from "node:vm";

const PARTS = {
  autograd: ["lanes"], compare: ["grids", "values"], messages: ["meetings"], metrics: ["charts"],
  pipeline: ["steps", "timeline", "curves"], progress: ["cells"], resources: ["charts"], shards: ["grids"],
};

// Returns names of a panel's module, loaded as a browser loads it: behind the lists, which `test_in_node.py` gives, the strings and
// the common part.
export function load(panel, ...names) {
  const read = (stem) => readFileSync(new URL(`../../rpcbench/panels/${stem}.js`, import.meta.url), "utf8");
  const parts = ["strings", "menu", "common", ...(PARTS[panel] ?? []), panel];
  const text = [process.env.LISTS_SCRIPT, ...parts.map(read)].join("\n").replace("export default ", "const made = ");
  return vm.runInNewContext(`${text}\n;({ ${names.join()} })`);
}

// Returns a copy with the prototypes of this module's realm, for deep comparisons.
export const plain = (value) => JSON.parse(JSON.stringify(value));
