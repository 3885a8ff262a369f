"""Black-box tests of the HTTP service over real sockets."""
