"""The telemetry process: facts on their way to it, and the questions that it and the front end ask each other."""
