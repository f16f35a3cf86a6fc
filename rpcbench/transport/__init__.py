"""Floor 3: bytes between processes: connections, listeners, the handshake, and the seam where links can be watched."""
