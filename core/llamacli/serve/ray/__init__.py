"""Data-parallel replicas of the engine under Ray Serve: `llamacli serve --ray`."""
