"""Breaks the library on purpose, one fault at a time, and shows that a test notices each.

    python -m tests.mutate            # all faults; words after it choose those that contain one

Every fault is applied to a copy of the project in a temporary folder, where the tests named beside
it run. A fault that no test notices, or whose text is no longer in the file, makes the run fail.
"""

import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
COPIED = ('attn', 'experiments', 'tests', 'setup.cfg')
POINTS = 'tests/conformance_test.py'
PROPERTIES = 'tests/conformance_property_test.py'
KERNELS = 'tests/kernels_test.py'
DROPOUT = 'tests/conformance_dropout_test.py'


class Fault(NamedTuple):
  """old becomes new in a file, once; tests should then fail: a file and, after ::, a -k filter."""
  what: str
  file: str
  old: str
  new: str
  tests: str


FAULTS = (
    Fault('a mask is ignored', 'attn/call.py', 'parts = [] if call.mask is None else [call.mask]',
          'parts = []', f'{POINTS}::vanilla and padding'),
    Fault('a window is one too wide', 'attn/masks.py', '(query - key <= self.left)',
          '(query - key <= self.left + 1)', f'{POINTS}::local-causal and grouped'),
    Fault('the next key leaks into causal attention', 'attn/masks.py', 'return key <= query\n',
          'return key <= query + 1\n', f'{PROPERTIES}::later_keys and blockwise'),
    Fault('a performer block sees its own future', 'attn/variants/performer.py',
          '(place[:, None] >= place)', '(place[:, None] >= place - 1)',
          f'{PROPERTIES}::later_keys and performer-causal'),
    Fault('masked keys stay in the Performer\'s normaliser', 'attn/variants/performer.py',
          'softmax.hide(log_key, None if seen is None else seen[..., None])', 'log_key',
          f'{POINTS}::performer and padding'),
    Fault('masked keys are projected by the Linformer', 'attn/variants/linformer.py',
          'hold = lambda x: jnp.where(seen[..., None], x, jnp.zeros_like(x))', 'hold = lambda x: x',
          f'{POINTS}::linformer and padding'),
    Fault('a Linformer query sees slots of later segments', 'attn/variants/linformer.py',
          'visible=masks.causal() & masks.other_block(size), forget',
          'visible=masks.other_block(size), forget', f'{PROPERTIES}::later_keys and linformer'),
    Fault('padding of a block counts in the normaliser', 'attn/call.py',
          'parts.append(columns(call.key_index) >= 0)',
          'parts.append(columns(call.key_index) >= -1)', f'{POINTS}::blockwise and grouped'),
    Fault('the bias is scaled', 'attn/call.py', 'logits += bias.astype(wide)',
          'logits += bias.astype(wide) * jnp.asarray(spec.scale, wide)',
          f'{POINTS}::vanilla and bias'),
    Fault('logits are not scaled', 'attn/checks.py', 'return head_dim**-0.5', 'return 1.0',
          f'{POINTS}::vanilla and grouped'),
    Fault('query heads read the wrong key heads', 'attn/call.py',
          'jnp.swapaxes(jnp.asarray(key), -3, -2)',
          'jnp.flip(jnp.swapaxes(jnp.asarray(key), -3, -2), -3)', f'{POINTS}::vanilla and grouped'),
    Fault('a hidden logit is a large number', 'attn/softmax.py', 'HIDDEN = -np.inf',
          'HIDDEN = -1e9', f'{PROPERTIES}::dense_mask and vanilla'),
    Fault('NaN in hidden values spreads', 'attn/call.py', 'if visible is None:\n    return call',
          'if True:\n    return call', f'{POINTS}::vanilla and NaN'),
    Fault('segment ids are ignored', 'attn/call.py', 'if call.query_segments is not None:',
          'if False:', f'{POINTS}::vanilla and segments'),
    Fault('kept weights are not scaled up', 'attn/dropout.py', 'jnp.asarray(1 / (1 - rate), dtype)',
          'jnp.asarray(1, dtype)', f'{DROPOUT}::dropped_or_scaled and vanilla'),
    Fault('dropout is shared by batch rows and heads', 'attn/dropout.py',
          'np.arange(np.prod(shape), dtype=np.uint32)', 'np.zeros(np.prod(shape), dtype=np.uint32)',
          f'{DROPOUT}::nothing_is_shared and vanilla'),
    Fault('the backward pass forgets dropout', 'attn/tiles.py', 'dp * factor', 'dp * 1.',
          f'{DROPOUT}::oracle and blockwise'),
    Fault('the backward pass forgets the normaliser', 'attn/tiles.py', 'p * (dp + dz',
          'p * (dp + 0. * dz', f'{POINTS}::blockwise and grouped'),
    Fault('a small number is added to the normaliser', 'attn/softmax.py',
          'state.weighted / total[..., None]', 'state.weighted / (total[..., None] + 1e-3)',
          f'{POINTS}::performer and grouped'),
    Fault('ALiBi rewards distance', 'attn/positions.py', 'return -slopes.reshape(',
          'return slopes.reshape(', 'tests/positions_test.py::alibi_bias'),
    Fault('T5 buckets are on the wrong side', 'attn/positions.py',
          'jnp.where(relative > 0, buckets, 0)', 'jnp.where(relative < 0, buckets, 0)',
          'tests/positions_test.py::t5_buckets'),
    Fault('RoPE pairs are mixed up', 'attn/positions.py', '  if interleaved:\n    a, b',
          '  if not interleaved:\n    a, b', 'tests/positions_test.py::rope_equals'),
    Fault('strided counts columns from zero', 'attn/masks.py', '((query - key) % self.stride == 0)',
          '(key % self.stride == 0)', 'tests/masks_test.py::strided'),
    Fault('fixed forgets its summaries', 'attn/masks.py',
          'key % self.size >= self.size - self.summary', 'key % self.size >= self.size',
          'tests/masks_test.py::fixed'),
    Fault('every step visits the first tiles', 'attn/layout.py', 'steps[number % len(steps)]',
          'steps[0]', f'{POINTS}::blockwise and grouped'),
    Fault('a band begins a tile too late', 'attn/layout.py', 'np.minimum(first, reached',
          'np.minimum(first + 1, reached', 'tests/layout_test.py::band'),
    Fault('a second visit of a query overwrites the first', 'attn/layout.py', 'reached.sum(1) <= 1',
          'reached.sum(1) <= 9', 'tests/layout_test.py::pattern'),
    Fault('a tile that no list holds is counted', 'attn/layout.py', '1 + 2 * r] > 0 if r',
          '1 + 2 * r] > -1 if r', f'{POINTS}::bigbird and grouped'),
    Fault('a tile is full where a window ends in it', 'attn/masks.py',
          '(last_query - first_key <= self.left)', '(first_query - first_key <= self.left)',
          'tests/masks_test.py::fills'),
    Fault('a tile is skipped that a global token reaches', 'attn/masks.py',
          'return (first_query < self.number) | (first_key < self.number)',
          'return first_query < self.number', f'{POINTS}::longformer-causal and positions'),
    Fault('a random block is counted twice', 'attn/variants/bigbird.py',
          'new & ~jnp.stack(twice, -1)', 'new', 'tests/bigbird_test.py::twice'),
    Fault('the random blocks of one head serve all', 'attn/layout.py',
          'lax.broadcasted_iota(jnp.int32, own, axis)', 'jnp.zeros(own, jnp.int32)',
          f'{POINTS}::bigbird-heads and grouped'),
    Fault('dead lanes of a step reach a position bias', 'attn/layout.py',
          'jnp.where(beyond, jnp.zeros_like(x), x)', 'x', f'{POINTS}::blockwise and ALiBi'),
    Fault('a ring is too short', 'attn/variants/local.py', 'stores.ring(left + 1,',
          'stores.ring(left - 1,', 'tests/cache_test.py::pieces and local'),
    Fault('a cache counts positions one too far', 'attn/cache.py',
          'jnp.cumsum(real, -1, dtype=jnp.int32) - 1', 'jnp.cumsum(real, -1, dtype=jnp.int32)',
          'tests/cache_test.py::pieces and fixed'),
    Fault('padding takes a position', 'attn/cache.py', 'jnp.cumsum(real, -1, dtype=jnp.int32) - 1',
          'jnp.cumsum(jnp.ones_like(real), -1, dtype=jnp.int32) - 1',
          'tests/cache_test.py::pieces and vanilla'),
    Fault('padding is written into a slot', 'attn/stores.py',
          'jnp.where(p < FAR, keep.place(p), keep.slots)', 'keep.place(p)',
          'tests/cache_test.py::pieces and local'),
    Fault('a ring is overwritten before it is read', 'attn/stores.py',
          'state = softmax.merge(state, look(call, spec, keep, store))',
          'state = softmax.merge(state, look(call, spec, keep, put(keep, store, call)))',
          'tests/cache_test.py::pieces and longformer'),
    Fault('of several keys for a slot the first stays', 'attn/stores.py',
          'np.triu(np.ones((slots.shape[-1],) * 2, bool), 1)',
          'np.tril(np.ones((slots.shape[-1],) * 2, bool), -1)',
          'tests/cache_test.py::pieces and local'),
    Fault('an empty part is taken for a full one', 'attn/stores.py',
          'jnp.any(store.positions < FAR), see', 'jnp.all(store.positions < FAR), see',
          'tests/cache_test.py::pieces and vanilla'),
    Fault('a store is copied at every step', 'attn/stores.py',
          'jnp.where(never[..., None], FAR, call.key_positions)', 'call.key_positions',
          'tests/cache_test.py::copies and vanilla'),
    Fault('a token beyond the end is clamped to the last slot', 'attn/cache.py',
          'fits = positions < cache.max_length', 'fits = positions < 10**6',
          'tests/cache_test.py::beyond'),
    Fault('a segment is projected before it is complete', 'attn/variants/linformer.py',
          'last = segment * size + size - 1', 'last = segment * size + size - 2',
          'tests/cache_test.py::pieces and linformer'),
    Fault('random blocks share a place too early', 'attn/variants/bigbird.py', 'if end < block',
          'if end < block + 1', 'tests/cache_test.py::bigbird_keeps'),
    Fault('beams do not take their caches along', 'attn/decoding.py',
          'jax.tree.map(lambda x: x[order], state)', 'state',
          'tests/decoding_test.py::every_cache and vanilla'),
    Fault('a search stops when the first hypothesis has ended', 'attn/decoding.py',
          'return carry.ended.scores[:, n - 1] >= hope',
          'return carry.ended.scores[:, 0] > softmax.HIDDEN', 'tests/decoding_test.py::can_win'),
    Fault('the prompt counts in the penalty', 'attn/decoding.py', 'np.arange(1., length + 1)',
          'np.arange(2., length + 2)', 'tests/decoding_test.py::exhaustive and power1'),
    Fault('an ended hypothesis goes on', 'attn/decoding.py',
          'log_probs.at[..., eos_id].set(hidden)', 'log_probs',
          'tests/decoding_test.py::rescoring'),
    Fault('a filter drops the token that crosses p', 'attn/sampling.py', '(ahead < p) |',
          '(total <= p) |', 'tests/sampling_test.py::nucleus'),
    Fault('a model stands still while it decodes', 'experiments/models/layers.py',
          'length.value = positions[:, -1] + 1', 'length.value = length.value',
          'tests/generate_test.py::logits and learned'),
    Fault('an answer may be longer than the target', 'experiments/decode.py', '| (place >= count)',
          '| (place >= 1)', 'tests/evaluate_test.py::throughout'),
    Fault('tiles are as large as the input', 'attn/layout.py', 'BLOCK = 512\n', 'BLOCK = 2**30\n',
          'tests/complexity_test.py::t_by_s and blockwise'),
    Fault('a pair that underflows is lost', 'attn/variants/performer.py',
          '_LOST, _APART = 1e-30, 30.', '_LOST, _APART = 0., -1e9',
          'tests/performer_test.py::large_keys'),
    Fault('a cache goes on with other arrays', 'attn/cache.py', 'if ours != theirs:', 'if False:',
          'tests/cache_edges_test.py::other_arrays'),
    Fault('narrow limits wrap', 'attn/decoding.py', 'if limits.dtype.itemsize < 4:', 'if False:',
          'tests/decoding_edges_test.py::narrow'),
    Fault('no temperature is one of 0', 'attn/decoding.py', 'return x is not None and not',
          'return not', 'tests/decoding_edges_test.py::no_temperature'),
    Fault('an interval is that of a normal', 'experiments/compare_results.py',
          'stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)', 'stats.norm.ppf((1 + CONFIDENCE) / 2)',
          'tests/compare_test.py::intervals'),
    Fault('the report takes the worst of the grid', 'experiments/compare_results.py',
          'best = max(points', 'best = min(points', 'tests/compare_test.py::rows_take'),
    Fault('a run that failed is not named', 'experiments/compare_report.py',
          'for name, said in results.failed.items()]', 'for name, said in {}.items()]',
          'tests/compare_test.py::reports_are'),
    Fault('rows of an evaluation are shorter too', 'experiments/tasks/__init__.py',
          'min_length=length if drawn else 0', 'min_length=0', 'tests/lengths_test.py::every_row'),
    Fault('generate moves a damaged checkpoint', 'experiments/checkpoint.py', 'if self._read_only:',
          'if False:', 'tests/generate_test.py::damaged'),
    Fault('a head that looks at itself is a duplicate', 'experiments/heads.py',
          'same &= (s < t) if', 'same &= (s <= t) if', 'tests/inspect_test.py::hand'),
    Fault('keys that go round stay where they are', 'attn/ring.py', 'onward = ring.shift(moved)',
          'onward = moved', 'tests/sharding_test.py::changes_nothing and vanilla-plain'),
    Fault('gradients of keys stay on another device', 'attn/ring.py',
          'return (kept, onward, ring.shift(extra)), None', 'return (kept, onward, extra), None',
          'tests/sharding_test.py::changes_nothing and vanilla-plain'),
    Fault('dropout counts from a device\'s own first token', 'attn/ring.py',
          'jnp.where(jnp.asarray(x) < 0, x, x + by)', 'jnp.asarray(x)',
          'tests/sharding_test.py::changes_nothing and vanilla-packed'),
    Fault('keys from beyond the ends are seen', 'attn/ring.py',
          'real = (index >= 0) & (index < ring.size * S)', 'real = index == index',
          'tests/sharding_test.py::changes_nothing and local-plain'),
    Fault('a Performer\'s sums of no device count', 'attn/sums.py',
          'jnp.where(ring.here >= by, came.max, softmax.HIDDEN)', 'came.max',
          'tests/sharding_test.py::small_features'),
    Fault('the decoder sees all of a source to be compressed', 'experiments/models/seq2seq.py',
          'if self.bottleneck:', 'if self.bottleneck and False:', 'tests/mad_test.py::one_vector'),
    Fault('events of an earlier session stay', 'experiments/tensorboard.py', 'old.unlink()', 'pass',
          'tests/tensorboard_test.py::once'),
    Fault('checkpoints that cannot be written to are found late', 'experiments/workdir.py',
          'if (self.path / CHECKPOINTS).exists():', 'if False:',
          'tests/faults_test.py::fault and checkpoints'),
    Fault('what orbax leaves behind is shown', 'experiments/checkpoint.py',
          "if str(unraisable.exc_value) != 'Event loop is closed':", 'if True:',
          'tests/faults_test.py::fault and flipped'),
    Fault('a cell that fails alone is not noted', 'experiments/compare.py',
          "    _note_failure(cell, getattr(error, 'exit_status', 1), str(error))\n", '',
          'tests/compare_test.py::fails_alone'),
    Fault('kernel: a query that sees nothing has the mean of all values', 'attn/kernels.py',
          'SINK = LOW / 2', 'SINK = -np.inf', f'{KERNELS}::masks_segments and blockwise'),
    Fault('kernel: what fills up a block is seen', 'attn/kernels.py',
          'jnp.broadcast_to(hidden, (*lead, more))',
          'jnp.broadcast_to(key[..., -1:], (*lead, more))', f'{KERNELS}::shapes and keys'),
    Fault('kernel: a hidden key has the id of a segment', 'attn/kernels.py',
          'return jnp.argmin(taken[:-1])', 'return 0 * jnp.argmin(taken[:-1])',
          f'{KERNELS}::masks_segments and blockwise'),
    Fault('kernel: a block that is full is empty', 'attn/kernels.py',
          'bool(self.mask_function.reaches(*ends))', 'False',
          f'{KERNELS}::masks_segments and blockwise-causal'),
    Fault('kernel: keys that no query sees are not forgotten', 'attn/kernels.py',
          'key=keep(keys_seen, call.key)', 'key=call.key', f'{KERNELS}::segments_of'),
    Fault('kernel: logits are not scaled', 'attn/kernels.py', 'whole((call.query * spec.scale)',
          'whole((call.query * 1)', f'{KERNELS}::masks_segments and local-causal'),
    Fault('kernel: a bias that hides all gives a mean', 'attn/kernels.py',
          'return jnp.where(sees, out[0, 0], jnp.zeros_like(q))', 'return out[0, 0]',
          f'{KERNELS}::bias_array'),
    Fault('kernel: a block of infinite biases is nan', 'attn/kernels.py',
          'jnp.maximum(bias.astype(jnp.float32), SINK)', 'bias.astype(jnp.float32)',
          f'{KERNELS}::bias_array'),
    Fault('kernel: positions of the caller are not looked at', 'attn/kernels.py',
          'if T != S or not (_counts(call.query_positions) and _counts(call.key_positions)):',
          'if False:', f'{KERNELS}::refusal'),
    Fault('kernel: it is chosen where devices share a call', 'attn/backends.py',
          'if jax.device_count() > 1 and', 'if False and', f'{KERNELS}::auto_chooses'),
    Fault('kernel: the derivative of its gradient is that of nothing', 'attn/backends.py',
          '[1](grads)\n', '[1](jax.tree.map(jnp.zeros_like, grads))\n', f'{KERNELS}::further'),
)


def occurrences(fault: Fault) -> int:
  return (ROOT / fault.file).read_text().count(fault.old)


def run_tests(folder: pathlib.Path, tests: str) -> subprocess.CompletedProcess:
  file, _, words = tests.partition('::')
  command = [
      sys.executable, '-m', 'pytest', '-x', '-q', '-p', 'no:cacheprovider', '--tb=line', file
  ]
  return subprocess.run(command + ['-k', words],
                        cwd=folder,
                        text=True,
                        capture_output=True,
                        env=os.environ | {'PYTHONDONTWRITEBYTECODE': '1'},
                        check=False)


def try_fault(fault: Fault | None, tests: str) -> tuple[int, str]:
  """pytest's exit status, and the first failure, in a copy of the project with the fault in it."""
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    for item in COPIED:
      source = ROOT / item
      copy = shutil.copytree if source.is_dir() else shutil.copy
      copy(source, folder / item)
    if fault is not None:
      path = folder / fault.file
      path.write_text(path.read_text().replace(fault.old, fault.new))
    result = run_tests(folder, tests)
  failures = [line for line in result.stdout.splitlines() if line.startswith(('FAILED', 'ERROR'))]
  return result.returncode, failures[0] if failures else result.stdout.strip()[-200:]


def judge(fault: Fault) -> tuple[bool, str]:
  """Whether the tests pass without the fault and fail (status 1) with it."""
  if occurrences(fault) != 1:
    return False, f'STALE {fault.what}: its text is {occurrences(fault)} times in {fault.file}'
  status, text = try_fault(None, fault.tests)
  if status != 0:
    return False, f'BROKEN {fault.what}: {fault.tests} fails without it: {text}'
  status, text = try_fault(fault, fault.tests)
  verdict = 'noticed' if status == 1 else 'UNNOTICED'
  return status == 1, f'{verdict} {fault.what} ({fault.file}): {text}'


def main(words: list[str]) -> int:
  faults = [f for f in FAULTS if not words or any(word in f.what for word in words)]
  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    noticed = 0
    for good, line in pool.map(judge, faults):
      print(line, flush=True)
      noticed += good
  print(f'{noticed} of {len(faults)} faults noticed')
  return 0 if noticed == len(faults) else 1


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
