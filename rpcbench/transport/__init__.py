"""Layer 3, transport of bytes between processes: connections, listeners, the handshake, and the message interceptor."""
