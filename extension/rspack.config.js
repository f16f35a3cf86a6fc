// JupyterLab's builder merges this into its own configuration. Without it the module ids depend on the folder of the build, but
// the bundle must be the same everywhere, byte for byte.
module.exports = { optimization: { moduleIds: 'natural' } };
