"""A real process under kill -9; tests/kill_resume.py shows the same at length."""

from tests import kill_resume

SMALL = ['--model_dim=8', '--heads=2', '--num_layers=1', '--length=4', '--steps=30',
         '--batch_size=4', '--dropout=0.1', '--log_every=1', '--eval_every=10', '--eval_batches=2',
         '--checkpoint_every=4']  # yapf: disable


def test_a_killed_run_ends_as_one_that_was_not(tmp_path):
  assert kill_resume.start(tmp_path / 'whole', SMALL).wait() == 0
  kill_resume.run_killed(tmp_path / 'killed', SMALL, kills=1, steps=30, seed=2)
  assert kill_resume.digests(tmp_path / 'killed') == kill_resume.digests(tmp_path / 'whole')
