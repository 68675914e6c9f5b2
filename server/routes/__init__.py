"""The HTTP routes: they shape what `server.generation` brings, and hold no state."""
