"""Where workers run: one module per engine, all behind `core.Launcher`."""
