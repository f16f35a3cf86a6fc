// Meshes as grids of ranks, and tensors as boxes: for the panels of sharded models and of comparisons.
// Guarantees
// - Pure functions of rows of a view, but for the nodes that they return.

const sizeText = (shape) => (shape.length ? `[${shape.join(", ")}]` : TEXT.scalar);

// Returns the coordinates of the element with this index in row-major order.
function coordinates(index, shape) {
  const at = [];
  for (const size of [...shape].reverse()) {
    at.unshift(index % size);
    index = Math.floor(index / size);
  }
  return at;
}

// Returns the places of a mesh's ranks in its drawing, and the size of the grid: the last dimension runs across, the one
// before it down, and all others give grids side by side.
function meshCells({ shape, ranks, workers }) {
  const full = [1, 1, ...shape].slice(-Math.max(2, shape.length));
  const [down, across] = full.slice(-2);
  const grids = full.slice(0, -2).reduce((product, size) => product * size, 1);
  const cells = ranks.map((rank, i) => {
    const at = coordinates(i, full);
    const grid = at.slice(0, -2).reduce((sum, one, dim) => sum * full[dim] + one, 0);
    return { rank, worker: workers[i], column: at.at(-1), row: at.at(-2), grid };
  });
  return { cells, down, across, grids };
}

// Draws a block of a box for a tensor; `block` is [left, top, width, height] as shares of the box.
const areaOf = ([x, y, width, height], wide, tall, kind) =>
  svg("rect", {
    class: kind, x: (x * wide).toFixed(1), y: (y * tall).toFixed(1),
    width: width && height ? Math.max(1.5, width * wide).toFixed(1) : 0,
    height: width && height ? Math.max(1.5, height * tall).toFixed(1) : 0,
  });
