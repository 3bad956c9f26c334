"""The bodies of the kernels, as `mx.fast.metal_kernel` takes them.

`HEADER` describes a page as `engine.cache.page_format` does. Elements have SIZE bytes: 1 for signed
codes, otherwise those of type T. Pools are flat, and their heads a template argument, because
each other form of a pool would be one more buffer.

What no tool on Linux can check is avoided: arrays of a threadgroup are declared at the top of a
body, and static members are `constexpr constant`."""

from __future__ import annotations

import numpy as np

from engine.cache.quantization import LARGEST, MARGIN, MIDDLE, SMALLEST_SCALE

HEADER = """
template <int P, int DK, int DV, int KG, int VG, int SIZE> struct Page {
  static constexpr constant int GK = SIZE == 1 ? DK / KG : 0;  // groups of a key
  static constexpr constant int GV = SIZE == 1 ? DV / VG : 0;
  static constexpr constant int ROW = (GK + GV + 1) / 2 * 2;   // scales of a position, whole words
  static constexpr constant int KEY = DK * SIZE / 4;           // words of a key
  static constexpr constant int VALUE = DV * SIZE / 4;
  static constexpr constant int VALUES = P * KEY;              // the first word of the values
  static constexpr constant int SCALES = VALUES + P * VALUE;
  static constexpr constant int WORDS = SCALES + P * ROW / 2;
};
struct Four { float x, y, z, w; };
template <typename T, int SIZE> struct Elements {
  static Four four(const device uint* from, int number) {
    const device T* at = (const device T*)from + 4 * number;
    return Four{float(at[0]), float(at[1]), float(at[2]), float(at[3])};
  }
};
template <typename T> struct Elements<T, 1> {
  static Four four(const device uint* from, int number) {
    const char4 c = as_type<char4>(from[number]);
    return Four{float(c.x), float(c.y), float(c.z), float(c.w)};
  }
};
"""

ATTEND = """
  // A SIMD group computes H of the G * Q queries of a key head over one part of a row's positions.
  // Its lanes are groups of L. Each group takes every (32 / L)th position, with a maximum and a sum
  // of its own, and a lane has DK / L elements of a key: one exponential serves 32 / L positions,
  // and nothing waits in the loop. The groups are merged once, at the end.
  using Its = Page<P, DK, DV, KG, VG, SIZE>;
  constexpr int M = G * Q, EK = DK / L, EV = DV / L, AT_ONCE = 32 / L, CHUNKS = (M + H - 1) / H;
  constexpr bool ONE_K = SIZE != 1 || KG % EK == 0;  // one scale for all elements of a lane
  constexpr bool ONE_V = SIZE != 1 || VG % EV == 0;
  const int lane = int(thread_index_in_simdgroup), of_group = lane / L, in_group = lane % L;
  const int head = int(threadgroup_position_in_grid.x) / CHUNKS;
  const int first_query = int(threadgroup_position_in_grid.x) % CHUNKS * H;
  const int row = int(threadgroup_position_in_grid.y);
  const int part = int(threadgroup_position_in_grid.z * simdgroups_per_threadgroup
                       + simdgroup_index_in_threadgroup);
  const int parts = limits[0], window = limits[1], part_tokens = limits[2];
  if (part >= parts) { return; }
  const int start = spans[2 * row];  // the position of the row's first query
  const int low = window > 0 ? metal::max(0, start + 1 - window) / P * P : 0;
  const int begin = low + part * part_tokens;
  const int end = metal::min(spans[2 * row + 1], begin + part_tokens);
  const float scale = factors[0];

  float q[H][EK], o[H][EV], m[H], l[H];
  for (int h = 0; h < H; h++) {
    const int n = metal::min(first_query + h, M - 1);  // head of queries, then query
    const device T* from = queries
        + (size_t(row * HEADS * G + head * G + n / Q) * Q + n % Q) * DK + in_group * EK;
    for (int i = 0; i < EK; i++) { q[h][i] = float(from[i]) * scale; }
    for (int i = 0; i < EV; i++) { o[h][i] = 0; }
    m[h] = -3.0e38f;
    l[h] = 0;
  }
  // All lanes take the same number of turns, so that they meet at shuffles.
  for (int turn = begin; turn < end; turn += AT_ONCE) {
    const int position = turn + of_group;
    const bool exists = position < end;
    const int place = exists ? position : begin;  // a position that was written
    const device uint* page = pool
        + (size_t(table[row * table_shape[1] + place / P]) * HEADS + head) * Its::WORDS;
    const int slot = place % P;
    const device half* scales = (const device half*)(page + Its::SCALES) + slot * Its::ROW;
    const device uint* key = page + slot * Its::KEY + in_group * EK * SIZE / 4;
    float score[H];
    for (int h = 0; h < H; h++) { score[h] = 0; }
    for (int w = 0; w < EK / 4; w++) {
      const Four k = Elements<T, SIZE>::four(key, w);
      const float s = ONE_K ? 1.0f : float(scales[(in_group * EK + 4 * w) / KG]);
      for (int h = 0; h < H; h++) {
        const float x = q[h][4 * w] * k.x + q[h][4 * w + 1] * k.y
            + q[h][4 * w + 2] * k.z + q[h][4 * w + 3] * k.w;
        score[h] += ONE_K ? x : x * s;
      }
    }
    const float key_scale = SIZE == 1 && ONE_K ? float(scales[in_group * EK / KG]) : 1.0f;
    for (int h = 0; h < H; h++) {
      score[h] *= key_scale;
      for (int step = 1; step < L; step *= 2) {
        score[h] += simd_shuffle_xor(score[h], ushort(step));
      }
    }
    const device uint* value = page + Its::VALUES + slot * Its::VALUE + in_group * EV * SIZE / 4;
    float v[EV];
    for (int w = 0; w < EV / 4; w++) {
      const Four x = Elements<T, SIZE>::four(value, w);
      const float s = ONE_V ? 1.0f : float(scales[Its::GK + (in_group * EV + 4 * w) / VG]);
      v[4 * w] = x.x * s; v[4 * w + 1] = x.y * s; v[4 * w + 2] = x.z * s; v[4 * w + 3] = x.w * s;
    }
    const float value_scale =
        SIZE == 1 && ONE_V ? float(scales[Its::GK + in_group * EV / VG]) : 1.0f;
    for (int h = 0; h < H; h++) {
      const float x = score[h];
      const int at = start + metal::min(first_query + h, M - 1) % Q;
      const bool seen = exists && position <= at && (window <= 0 || position > at - window);
      if (seen) {
        if (x > m[h]) {
          const float keep = metal::fast::exp(m[h] - x);
          m[h] = x;
          l[h] *= keep;
          for (int i = 0; i < EV; i++) { o[h][i] *= keep; }
        }
        const float share = metal::fast::exp(x - m[h]);
        l[h] += share;
        for (int i = 0; i < EV; i++) { o[h][i] += (share * value_scale) * v[i]; }
      }
    }
  }
  for (int h = 0; h < H; h++) {
    for (int step = L; step < 32; step *= 2) {
      const float other = simd_shuffle_xor(m[h], ushort(step));
      const float top = metal::max(m[h], other);
      const float mine = metal::fast::exp(m[h] - top), its = metal::fast::exp(other - top);
      l[h] = l[h] * mine + simd_shuffle_xor(l[h], ushort(step)) * its;
      for (int i = 0; i < EV; i++) {
        o[h][i] = o[h][i] * mine + simd_shuffle_xor(o[h][i], ushort(step)) * its;
      }
      m[h] = top;
    }
  }
  for (int h = 0; h < H; h++) {
    const int n = first_query + h;
    if (n < M && of_group == 0) {
      const size_t query = size_t(row * HEADS * G + head * G + n / Q) * Q + n % Q;
      const size_t to = query * parts + part;
      for (int i = 0; i < EV; i++) { sums[to * DV + in_group * EV + i] = o[h][i]; }
      if (in_group == 0) { tops[2 * to] = m[h]; tops[2 * to + 1] = l[h]; }
    }
  }
"""
"""Attention of few queries: sums of each part of a row's positions, not divided yet, and their
maxima and totals. ``spans`` are the first query's position and the row's end, ``limits`` the number
of parts, the window (0: none) and the positions of a part, ``factors`` the scale."""

JOIN = """
  // A threadgroup of S SIMD groups joins the parts of one query.
  threadgroup float found[S][DV];
  threadgroup float most[S], total[S];
  const int parts = sums_shape[1], number = int(threadgroup_position_in_grid.x);
  const int lane = int(thread_index_in_simdgroup), simd = int(simdgroup_index_in_threadgroup);
  float top = -3.0e38f, sum = 0;
  for (int part = simd * 32 + lane; part < parts; part += S * 32) {
    top = metal::max(top, tops[2 * (number * parts + part)]);
  }
  top = simd_max(top);
  most[simd] = top;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int s = 0; s < S; s++) { top = metal::max(top, most[s]); }
  if (SINKS) { top = metal::max(top, float(sinks[number / Q % QUERY_HEADS])); }
  float o[(DV + 31) / 32];
  for (int i = 0; i < (DV + 31) / 32; i++) { o[i] = 0; }
  for (int part = simd; part < parts; part += S) {
    const int at = number * parts + part;
    const float weight = metal::fast::exp(tops[2 * at] - top);
    sum += weight * tops[2 * at + 1];
    for (int i = 0; i * 32 + lane < DV; i++) {
      o[i] += weight * sums[size_t(at) * DV + i * 32 + lane];
    }
  }
  for (int i = 0; i * 32 + lane < DV; i++) { found[simd][i * 32 + lane] = o[i]; }
  total[simd] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simd == 0) {
    float all = SINKS ? metal::fast::exp(float(sinks[number / Q % QUERY_HEADS]) - top) : 0.0f;
    for (int s = 0; s < S; s++) { all += total[s]; }
    for (int i = 0; i * 32 + lane < DV; i++) {
      float x = 0;
      for (int s = 0; s < S; s++) { x += found[s][i * 32 + lane]; }
      out[size_t(number) * DV + i * 32 + lane] = T(x / all);
    }
  }
"""
"""Joins what `ATTEND` returns."""

GATHER = """
  // A thread copies four elements of a key and of a value.
  using Its = Page<P, DK, DV, KG, VG, SIZE>;
  const int count = limits[0], low = limits[1];
  const int word = int(thread_position_in_grid.x), n = int(thread_position_in_grid.y);
  const int row = int(thread_position_in_grid.z) / HEADS;
  const int head = int(thread_position_in_grid.z) % HEADS;
  if (n >= count) { return; }
  const int position = low + n, slot = position % P;
  const device uint* page = pool
      + (size_t(table[row * table_shape[1] + position / P]) * HEADS + head) * Its::WORDS;
  const device half* scales = (const device half*)(page + Its::SCALES) + slot * Its::ROW;
  const size_t to = size_t(row * HEADS + head) * count + n;
  const bool exists = position < ends[row];  // others are zero: a mask gives them a share of zero
  if (word < DK / 4) {
    Four x = Four{0, 0, 0, 0};
    if (exists) { x = Elements<T, SIZE>::four(page + slot * Its::KEY, word); }
    const float s = exists && SIZE == 1 ? float(scales[4 * word / KG]) : 1.0f;
    device T* at = keys + to * DK + 4 * word;
    at[0] = T(x.x * s); at[1] = T(x.y * s); at[2] = T(x.z * s); at[3] = T(x.w * s);
  }
  if (word < DV / 4) {
    Four x = Four{0, 0, 0, 0};
    if (exists) { x = Elements<T, SIZE>::four(page + Its::VALUES + slot * Its::VALUE, word); }
    const float s = exists && SIZE == 1 ? float(scales[Its::GK + 4 * word / VG]) : 1.0f;
    device T* at = values + to * DV + 4 * word;
    at[0] = T(x.x * s); at[1] = T(x.y * s); at[2] = T(x.z * s); at[3] = T(x.w * s);
  }
"""
"""Pages as arrays, for MLX's attention: ``limits`` are the number of positions and the first."""

ROUND = """
  // A SIMD group rounds the key and the value of one position and head.
  constexpr int GK = DK / KG, GV = DV / VG, ROW = (GK + GV + 1) / 2 * 2, ALL = (DK + DV) / 4;
  threadgroup float magnitudes[ALL];
  threadgroup half scales[ROW];
  const int lane = int(thread_index_in_simdgroup);
  const size_t number = size_t(threadgroup_position_in_grid.x);
  const device T* key = keys + number * DK;
  const device T* value = values + number * DV;
  for (int w = lane; w < ALL; w += 32) {
    const device T* from = w < DK / 4 ? key + 4 * w : value + (4 * w - DK);
    float largest = 0;
    for (int i = 0; i < 4; i++) {
      largest = metal::max(largest, metal::min(metal::abs(float(from[i])), LIMIT));
    }
    magnitudes[w] = largest;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int g = lane; g < ROW; g += 32) {
    const int first = g < GK ? g * KG / 4 : (DK + (g - GK) * VG) / 4;
    const int count = g < GK ? KG / 4 : (g < GK + GV ? VG / 4 : 0);
    float largest = 0;
    for (int i = 0; i < count; i++) { largest = metal::max(largest, magnitudes[first + i]); }
    scales[g] = count == 0 ? half(0.0f) : half((largest + ADDED) * FACTOR);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  device uint* to = words + number * (ALL + ROW / 2);
  for (int w = lane; w < ALL; w += 32) {
    const device T* from = w < DK / 4 ? key + 4 * w : value + (4 * w - DK);
    const float s = float(scales[w < DK / 4 ? 4 * w / KG : GK + (4 * w - DK) / VG]);
    uint word = 0;
    for (int i = 0; i < 4; i++) {
      const float x = metal::min(metal::max(float(from[i]), -LIMIT), LIMIT);
      word |= uint(int(metal::rint(x / s)) & 255) << (8 * i);
    }
    to[w] = word;
  }
  for (int g = lane; g < ROW / 2; g += 32) {
    to[ALL + g] = uint(as_type<ushort>(scales[2 * g]))
        | (uint(as_type<ushort>(scales[2 * g + 1])) << 16);
  }
"""
"""New keys and values as the words of `PageFormat.words_of`, with 8 bits."""


def _constant(name: str, value: float) -> str:
    """Define ``name`` as the fp32 number that MLX makes of ``value``."""
    return f"#define {name} {float(np.float32(value))!r}f\n"


ROUND_HEADER = (
    _constant("LIMIT", LARGEST)
    + _constant("ADDED", (MIDDLE - 1) * SMALLEST_SCALE)
    + _constant("FACTOR", (1 + MARGIN) / (MIDDLE - 1))
)

CUDA = """
#define device
#define constant
#define threadgroup __shared__
#define threadgroup_position_in_grid blockIdx
#define thread_position_in_grid \\
  make_uint3(blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y, \\
             blockIdx.z * blockDim.z + threadIdx.z)
#define thread_index_in_simdgroup (threadIdx.x & 31u)
#define simdgroup_index_in_threadgroup \\
  ((threadIdx.x >> 5) + (blockDim.x >> 5) * (threadIdx.y + blockDim.y * threadIdx.z))
#define simdgroups_per_threadgroup ((blockDim.x >> 5) * blockDim.y * blockDim.z)
#define simd_shuffle_xor(x, by) __shfl_xor_sync(0xffffffffu, x, by)
#define threadgroup_barrier(flags) __syncthreads()
typedef unsigned int uint;
typedef unsigned short ushort;
typedef __half half;
template <typename To, typename From> __device__ To as_type(const From& from) {
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}
__device__ inline float simd_max(float x) {
  for (int step = 16; step > 0; step /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  }
  return x;
}
namespace metal {
template <typename T> __device__ T max(T a, T b) { return a > b ? a : b; }
template <typename T> __device__ T min(T a, T b) { return a < b ? a : b; }
__device__ inline float abs(float x) { return fabsf(x); }
__device__ inline float rint(float x) { return rintf(x); }
namespace fast { __device__ inline float exp(float x) { return __expf(x); } }
}  // namespace metal
"""
"""Gives the same bodies to `mx.fast.cuda_kernel`."""
