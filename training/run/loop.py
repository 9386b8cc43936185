"""Train a model, top to bottom: check, open a session, take the steps of each stage, finish.

This is the table of contents; session.py has each step.
"""

from __future__ import annotations

from pathlib import Path

from training.config.schema import TrainConfig
from training.run.preflight import preflight
from training.run.session import opened


def train(config: TrainConfig) -> Path:
    """Train to config.steps, or resume an earlier run, and return its folder.

    Raise Stopped after writing a checkpoint if a signal asks the run to end.
    """
    config = preflight(config)
    with opened(config) as session:
        session.begin()
        for stage in session.stages_left():
            session.begin_stage(stage)
            while session.goes_on():
                learned = session.learn(session.next_batches())
                session.count(learned | session.exchange())
                session.heed_signals()
                session.log_if_due()
                session.check_alive()
                session.save_if_due()
                session.validate_if_due()
        session.finish()
    session.push()
    session.say_if_stopped()
    return session.folder
