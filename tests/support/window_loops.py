"""A script's own loop over an engine's windows, as it may be stopped and resumed."""


def train_in_windows(engine, batches, loss, until=None):
    """Train on one pass over the data, and return the engine; stop after a micro-step if one is given."""
    for window in engine.windows(batches):
        for batch in window:
            with engine.autocast():
                value = loss(engine.model, batch)
            engine.backward(value)
            if engine.micro_step == until:
                return engine
    return engine
