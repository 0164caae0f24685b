"""The benchmark: what it counts, fits, compares and writes, on known programs and curves."""

import configparser
import csv
import functools
import io
import json
import math
from pathlib import Path

import attn
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
from packaging.requirements import Requirement
import pytest

from experiments import bench
from experiments import bench_accuracy
from experiments import bench_claims
from experiments import bench_contenders
from experiments import bench_curves
from experiments import bench_extremes
from experiments import bench_grid
from experiments import bench_measure
from experiments import bench_plot
from experiments import bench_report
from experiments import bench_steps
from experiments import bench_torch
from experiments.bench_contenders import Problem
from experiments.bench_progress import Progress

SETUP = Path(__file__).parents[1] / 'setup.cfg'
X, Y = jnp.ones((3, 5)), jnp.ones((5, 7))
PRODUCT = 2 * 3 * 5 * 7


def flops(function, *arguments):
  return bench_measure.flops(jax.make_jaxpr(function)(*arguments).jaxpr)


def scan(x, y):
  return lax.scan(lambda total, _: (total + x @ y, None), jnp.zeros((3, 7)), length=11)[0]


def nested(x, y):
  return lax.scan(lambda total, _: (total + scan(x, y), None), jnp.zeros((3, 7)), length=2)[0]


def branches(x, y):
  return lax.cond(x[0, 0] > 0, lambda: x @ y, lambda: x @ y + x @ (2 * y))


def loop(x, y):
  return lax.while_loop(lambda z: z[0, 0] < 9, lambda z: z + x @ y, jnp.zeros((3, 7)))


@jax.custom_vjp
def custom(x, y):
  return x @ y


custom.defvjp(lambda x, y: (x @ y, (x, y)), lambda kept, d: (d @ kept[1].T @ jnp.eye(5), None))


@pytest.mark.parametrize('function, products', [
    (jnp.matmul, 1),
    (jnp.add, 0),
    (scan, 11),
    (nested, 22),
    (branches, 2),
    (jax.jit(jax.remat(jnp.matmul)), 1),
    (custom, 1),
    (loop, None),
], ids=lambda x: getattr(x, '__name__', str(x)))  # yapf: disable
def test_flops_of_known_programs(function, products):
  arguments = (X, X) if function is jnp.add else (X, Y)
  assert flops(function, *arguments) == (products and products * PRODUCT)


def test_flops_of_a_custom_gradient_are_its_own():
  gradient = jax.grad(lambda x: jnp.sum(custom(x, Y)))
  assert flops(gradient, X) == PRODUCT + 2 * 3 * 7 * 5 + 2 * 3 * 5 * 5


def test_a_loop_without_products_costs_none():
  assert flops(lambda x: lax.while_loop(lambda z: z[0, 0] < 9, lambda z: z + 1, x) @ Y,
               X) == PRODUCT


def test_flops_of_attention():
  N, T, H = 2, 24, 8
  inputs = [jax.ShapeDtypeStruct((1, T, N, H), jnp.float32)] * 3
  forward = 4 * N * T * T * H
  assert flops(attn.vanilla_attention, *inputs) == forward
  assert flops(functools.partial(attn.blockwise_attention, block_size=8), *inputs) == forward
  given = jax.ShapeDtypeStruct((1, T, N, H), jnp.float32)
  both = bench_contenders.directed(lambda arrays, *qkv: attn.vanilla_attention(*qkv), 'gradient')
  assert flops(both, {}, *inputs, given) == 3 * forward


def test_alternation_calls_everything_once_untimed_and_once_timed_in_turn():
  called, now = [], [0.]

  def call(name, seconds):
    called.append(name)
    now[0] += seconds if called.count(name) % 2 == 0 else 100.  # The untimed call is slow.

  turns = []
  seconds = bench_measure.alternate(
      [functools.partial(call, 'a', 1.),
       functools.partial(call, 'b', 2.)],
      3,
      clock=lambda: now[0],
      before=lambda *turn: turns.append(turn))
  assert called == ['a', 'a', 'b', 'b'] * 3
  assert seconds == [[1.] * 3, [2.] * 3]
  assert turns == [(number, index) for number in range(3) for index in range(2)]


def test_timing_is_median_and_quartiles():
  assert bench_measure.timing([1., 2., 3., 4., 100.]) == (3., 2. / 3.)
  assert bench_measure.timing([5.]) == (5., 0.)


@pytest.mark.parametrize('power', [0., 1., 1.5, 2.])
def test_growth_of_exact_powers(power):
  curve = {length: 3e-4 * length**power for length in (512, 1024, 4096, 8192)}
  assert math.isclose(bench_curves.growth(curve), power, abs_tol=1e-9)


def test_growth_needs_two_amounts():
  assert bench_curves.growth({512: 1.}) is None
  assert bench_curves.growth({512: 0., 1024: 1.}) is None


LINE = {length: float(length) for length in (256, 512, 1024, 2048)}

AGAIN = {256: 300., 512: 500., 1024: 1000., 2048: 8192.}
CURVES = {
    'crossing': ({T: T**2 / 700 for T in LINE}, 700.),
    'always': ({T: T**2 / 100 for T in LINE}, 256.),
    'never': ({T: T**2 / 5000 for T in LINE}, None),
    'equal': (LINE, None),
    'touches': ({
        256: 300.,
        512: 512.,
        1024: 2000.
    }, 512.),
    'loses again': (AGAIN, 1024 * 2**(math.log(1.024) / math.log(4.096))),
    'dense is shorter': ({256: 100., 512: 1024.}, 256 * 2**(math.log(2.56) / math.log(5.12))),
    'nothing in common': ({}, None),
}  # yapf: disable


@pytest.mark.parametrize('dense, length', CURVES.values(), ids=CURVES)
def test_efficiency_length(dense, length):
  found = bench_curves.efficiency_length(LINE, dense)
  assert found is None if length is None else math.isclose(found, length, rel_tol=1e-9)


@pytest.mark.sampled(4)
@pytest.mark.parametrize('contender', bench_contenders.ours() + bench_contenders.jax_peers(),
                         ids=lambda contender: contender.label)  # yapf: disable
def test_each_contender_computes_what_its_name_says(contender):
  problem = Problem(1, 65, 2, 8, 'float32')
  found = bench_accuracy.errors(contender, problem, 'forward')
  assert found['own'] < 1e-5
  assert found['dense'] is None if contender.variant in ('linformer',
                                                         'performer') else found['dense'] < 1e-5


def test_the_dense_reference_is_attention_and_its_gradients():
  problem = Problem(2, 9, 2, 4, 'float32')
  mask = np.tril(np.ones((9, 9), bool))
  found = bench_contenders.reference('vanilla', True, problem, 'gradient')
  wanted = bench_accuracy.dense(bench_contenders.draw(problem), mask)
  assert len(found) == len(wanted) == 4 and bench_accuracy.largest(found, wanted) < 1e-12


def test_every_variant_is_measured():
  assert {contender.name for contender in bench_contenders.ours()} == set(attn.VARIANTS)


@pytest.fixture(scope='module')
def result():
  """A whole grid of tiny problems, and claims and extremes of the same form."""
  contenders = bench_contenders.ours(['vanilla', 'local']) + bench_contenders.jax_peers()[:2]
  broken = contenders[0]._replace(name='broken', maker='jax', prepare=lambda *_: 1 / 0)
  grid = bench_grid.Grid(contenders=[*contenders, broken],
                         batch=1,
                         heads=2,
                         head_dim=4,
                         lengths=(16, 32),
                         dtypes=('float32',),
                         rounds=2,
                         memory_bytes=1e9,
                         checked=('forward',))
  saved = []
  measured = bench_grid.run(grid, lambda grid: saved.append(len(grid['cells'])))
  assert saved == [7, 14, 21, 28]
  Claim = bench_claims.Claim
  claims = bench_claims.run(1, [
      Claim('local causal', 'blockwise causal', 16, 'forward', .1),
      Claim('nothing', 'jax.nn', 16, 'forward', .1)
  ])
  local = next(c for c in contenders if c.label == 'local')
  problem = Problem(1, 16, 2, 4, 'float32')
  row = dict(label='local', length=16)
  extremes = dict(compile=[row | bench_extremes.compile_twice(local, problem)],
                  memory=[row | dict(temp_bytes=8)],
                  long=[row | bench_extremes.long_gradient(local, 16, 1e9)])
  return dict(circumstances=bench_report.circumstances("python -m experiments.bench '--a=b c'",
                                                       'cpu'),
              missing={'torch': 'pip install torch==1'},
              grid=measured,
              claims=claims,
              extremes=extremes)


def test_files_hold_every_cell(result, tmp_path):
  bench_report.write(result, tmp_path)
  assert sorted(path.name for path in tmp_path.iterdir()) == ['bench.csv', 'bench.json', 'bench.md']
  cells = result['grid']['cells']
  assert json.loads((tmp_path / 'bench.json').read_text())['grid']['cells'] == cells
  text = (tmp_path / 'bench.csv').read_text()
  lines = list(csv.DictReader(line for line in io.StringIO(text) if not line.startswith('# ')))
  key = lambda row: (row['name'], str(row['causal']), row['direction'], str(row['length']))
  assert list(map(key, lines)) == list(map(key, cells))
  for line, cell in zip(lines, cells):
    assert line['median'] == str(cell.get('median', '')) and bool(line['skipped']) == ('skipped'
                                                                                       in cell)
  for word in ('--a=b c', jax.__version__, 'cores', 'date', 'device'):
    assert word in text and word in (tmp_path / 'bench.md').read_text()


def test_tables_show_every_cell(result):
  text = bench_report.markdown(result)
  for cell in result['grid']['cells']:
    shown = 'skipped' if 'skipped' in cell else f'{1e3 * cell["median"]:.4g} ('
    assert any(
        line.startswith(f'| {cell["label"]} |') and shown in line for line in text.splitlines())
  assert 'broken, T 16, forward, float32: failed: ZeroDivisionError' in text
  assert 'error of broken, forward, float32: ZeroDivisionError' in text
  assert '| local causal | blockwise causal | 16 | forward |' in text
  assert 'attn has no variant nothing' in text and 'pip install torch==1' in text
  assert '| local | 16 | 8 |' in text  # extremes


def test_cells_are_measured_or_say_why_not(result):
  for cell in result['grid']['cells']:
    if cell['name'] == 'broken':
      assert cell['failed'] and 'median' not in cell
    else:
      assert len(cell['seconds']) == 2 and cell['median'] > 0 and cell['temp_bytes'] >= 0
      operations = cell['share'] * cell['median'] * result['grid']['matmul']['float32']
      assert math.isclose(cell['flops'], operations)


def test_what_needs_too_much_memory_is_left_out_with_the_reason():
  contenders = {c.label: c for c in bench_contenders.ours() + bench_contenders.jax_peers()}
  grid = bench_grid.Grid((), 1, 8, 64, (), (), 1, memory_bytes=8e9)
  for label in ('vanilla causal', 'jax.nn', 'flax'):  # refused without compiling anything
    ready, known = bench_grid.prepare(contenders[label], grid, grid.problem(16384, 'float32'),
                                      'forward')
    assert ready is None and known == dict(skipped='its [T, T] logits need 8.6 GB')
  grid = grid._replace(memory_bytes=10)
  ready, known = bench_grid.prepare(contenders['local'], grid, Problem(1, 64, 1, 4, 'float32'),
                                    'forward')
  assert ready is None and known['skipped'].startswith('its program needs')


def test_growth_and_efficiency_are_those_of_the_cells(result):
  grid = result['grid']
  growth = {(row['label'], row['direction']): row for row in grid['growth']}
  curve = bench_grid.curve(grid['cells'], 'median', label='local', direction='gradient')
  assert sorted(curve) == [16, 32]
  assert growth['local', 'gradient']['time'] == bench_curves.growth(curve)
  assert {row['against'] for row in grid['efficiency']} == {'vanilla', 'jax.nn'}
  for row in grid['efficiency']:
    assert row['name'] == 'local' and row['longest'] == 32


def test_a_claim_is_the_ratio_of_medians(result):
  claim, absent = result['claims']
  assert claim['ratio'] == claim['mine_median'] / claim['peer_median'] and claim['target'] == .1
  assert 'ratio' not in absent


def test_claims_name_contenders_that_exist():
  names = {*bench_contenders.OPTIONS, 'jax.nn', *(peer.name for peer in bench_torch.PEERS)}
  names |= {model for model, _ in bench_claims.MODELS}
  for claim in bench_claims.CLAIMS:
    assert {claim.mine.removesuffix(' causal'), claim.peer.removesuffix(' causal')} <= names


def test_a_second_call_compiles_nothing(result):
  assert result['extremes']['compile'][0]['second_call_recompiles'] is False
  assert result['extremes']['long'][0]['heads'] == 8


def test_a_long_gradient_takes_one_head_where_memory_needs_it():
  local, = bench_contenders.ours(['local'])[:1]
  eight = local.prepare(Problem(1, 64, 8, 64, 'float32'), 'gradient').temp_bytes
  found = bench_extremes.long_gradient(local, 64, eight - 1)
  assert found['heads'] == 1 and found['seconds'] > 0
  assert 'skipped' in bench_extremes.long_gradient(local, 64, 1)


def test_the_steps_of_a_model_put_the_table_back(monkeypatch):
  for name in ('BATCH', 'LAYERS', 'HEADS'):
    monkeypatch.setattr(bench_steps, name, 1)
  monkeypatch.setattr(bench_steps, 'WIDTH', 8)
  before = dict(attn.VARIANTS)
  called = []
  attention = bench_steps.jax_nn
  monkeypatch.setattr(bench_steps, 'jax_nn', lambda *a: called.append(a) or attention(*a))
  run = bench_steps.flax_step('jax.nn', 8)
  assert called and attn.VARIANTS == before
  run()
  run()


def test_progress_counts_and_estimates():
  stream = io.StringIO()
  progress = Progress(2, 4., stream)
  progress.cell('first', 1.)
  progress.turn('round', 1.)
  progress.cell('second', 1.)
  progress.end()
  first, second = stream.getvalue().splitlines()
  assert first == '[1/2] first' and second.startswith('[2/2] second, about 0 min 00 s left')


@pytest.mark.parametrize('places', [[0., 1.], [.5, .5, .5], [.1, .11, .5, .52, .9], []])
def test_names_in_a_picture_keep_their_distance(places):
  found = bench_plot.spread(places, .1)
  assert len(found) == len(places) and math.isclose(sum(found), sum(places), abs_tol=1e-9)
  assert all(b - a > .1 - 1e-9 for a, b in zip(found, found[1:]))


@pytest.mark.parametrize('line, message', [
    ('--variants=vanila', "variants: 'vanila' is not one of: vanilla, blockwise"),
    ('--dtypes=int8', "dtypes: 'int8' is not one of"),
    ('--lengths=12,x', 'lengths must be integers'),
    ('--variant=local', 'variants'),
    ('--rounds=0', 'rounds'),
    ('--claims --lengths=512', '--lengths is not read by --claims'),
    ('--claims --short', '--short'),
    ('--claims --nopeers', '--peers is not read by --claims'),
    ('short', "unexpected argument 'short'"),
    ('--out=/dev/null/bench --extremes', '/dev/null/bench'),
])
def test_a_mistake_is_one_line(capsys, line, message):
  status = 1 if '--out' in line else 2
  assert bench.main(['bench', *line.split()]) == status
  out, err = capsys.readouterr()
  assert not out and err.count('\n') == 1 and err.startswith('error: ') and message in err


def test_help_lists_the_flags(capsys):
  assert bench.main(['bench', '--help']) == 0
  text = capsys.readouterr().out
  assert '--[no]claims' in text and '--rounds=5' in text and '--tpu=v4|v5e' in text


def test_short_is_shorter_and_what_is_given_holds():
  request = bench.parse(['bench', '--short', '--rounds=2'])
  assert request.parts == ('grid',) and request.rounds == 2
  assert request.lengths == (512, 1024, 2048) and request.dtypes == ('float32',)
  grid = bench.make_grid(request)
  assert {c.name for c in grid.contenders if c.maker == 'attn'} == set(attn.VARIANTS)
  assert bench.parse(['bench']).parts == ('grid', 'claims')
  assert bench.parse(['bench', '--claims', '--extremes']).parts == ('claims', 'extremes')


def test_without_peers_only_ours_are_timed():
  request = bench.parse(['bench', '--nopeers', '--variants=local'])
  assert request.parts == ('grid',)
  assert {c.label for c in bench.make_grid(request).contenders} == {'local', 'local causal'}


def test_a_report_without_peers_does_not_speak_of_them(tmp_path, capsys):
  line = f'--nopeers --variants=local --lengths=8,16 --dtypes=float32 --rounds=1 --out={tmp_path}'
  assert bench.main(['bench', *line.split()]) == 0
  text = (tmp_path / 'bench.md').read_text()
  assert '| local causal |' in text and 'growth, time' in text
  assert 'jax.nn' not in text and 'below dense' not in text and 'not installed' not in text
  capsys.readouterr()


def test_peers_are_pinned_as_in_setup_cfg():
  setup = configparser.ConfigParser(interpolation=None)
  setup.read(SETUP)
  pins = map(Requirement, setup['options.extras_require']['bench'].split())
  pinned = {pin.name: str(pin.specifier) for pin in pins}
  assert {
      name: f'=={version}' for name, version in bench_torch.PACKAGES.items()
  }.items() <= pinned.items()
