// Added to the builder's own configuration. Numbers of modules otherwise depend on the folder that this is built in, and
// the bundle shall be the same everywhere, byte for byte.
module.exports = { optimization: { moduleIds: 'natural' } };
