"""Decode steps are measured where they say they are, and land in the report."""

from experiments import bench
from experiments import bench_decode
from experiments import bench_report
import numpy as np
import pytest


@pytest.fixture
def small(monkeypatch):
  for name, value in dict(STEPS=2, LAYERS=1, HEADS=2, WIDTH=8, PROMPT=4, NEW=3, VOCAB=11).items():
    monkeypatch.setattr(bench_decode, name, value)


def test_variants_have_their_steps_and_bytes(small):
  variants = ['vanilla', 'bigbird', 'performer']
  rows = bench_decode.run(1, variants, positions=[8, 16])
  assert [row['label'] for row in rows] == variants
  for row in rows:
    assert [step['position'] for step in row['steps']] == [8, 16]
    assert all(step['median'] > 0 for step in row['steps'])
  assert rows[0]['state_bytes'] == 16 * (2 * 2 * 64 * 4 + 4) + 5
  lines = bench_report.markdown(dict(circumstances={}, missing={}, decode=rows)).splitlines()
  assert '|  | position 8 | position 16 | cache |' in lines
  assert sum(line.startswith('| vanilla | ') for line in lines) == 1


def test_steps_stand_at_the_position_every_time(small):
  run = bench_decode.attention_steps('local', 8, 16)
  run()
  run()
  cells = dict(zip(run.__code__.co_freevars, (cell.cell_contents for cell in run.__closure__)))
  assert np.asarray(cells['cache'].length).tolist() == [8]


def test_a_model_decodes_in_place_and_generates(small):
  run = bench_decode.flax_step(9)
  run()
  run()
  tokens = bench_decode.flax_generate(7)()
  assert tokens.shape == (1, 3) and np.all((0 <= tokens) & (tokens < 11))


def test_the_flag_runs_it_alone():
  request = bench.parse(['bench', '--decode', '--variants=local', '--rounds=2'])
  assert request.parts == ('decode',) and request.variants == ('local',)
