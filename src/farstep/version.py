"""The version of this distribution; read by the build, the handshake and `farstep.__version__`."""

VERSION = "0.1.0"
