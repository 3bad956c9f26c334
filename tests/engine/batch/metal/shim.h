// Runs the body of a Metal kernel as C++, with a fiber for each thread of the GPU.
//
// Operations of a SIMD group and barriers are points where all threads of the group have to meet: a
// thread that returns or is at another such point is an error, because the result is undefined on a
// GPU. Threads run in an order that depends on a seed, so that results that depend on the order,
// for lack of a barrier, differ between seeds.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

typedef unsigned int uint;
typedef unsigned short ushort;
struct half {
  uint16_t bits = 0;
  half() = default;
  half(float x) {
    uint32_t u = std::bit_cast<uint32_t>(x), sign = u >> 16 & 0x8000;
    u &= 0x7FFFFFFF;
    const float size = std::bit_cast<float>(u);
    if (x != x) bits = 0x7E00;
    else if (size >= 65520) bits = sign | 0x7C00;
    else if (size < 6.103515625e-05f) bits = sign | uint16_t(std::nearbyint(size * 0x1p24f));
    else bits = sign | uint16_t((u + 0xFFF + (u >> 13 & 1) - (112u << 23)) >> 13);
  }
  operator float() const {
    const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 31;
    const uint32_t rest = bits & 1023;
    if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000 | rest << 13);
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * rest * 0x1p-24f;
    return std::bit_cast<float>(sign | (exponent + 112) << 23 | rest << 13);
  }
};
typedef half float16_t;
struct bfloat16_t {
  uint16_t bits = 0;
  bfloat16_t() = default;
  bfloat16_t(float x) {
    const uint32_t u = std::bit_cast<uint32_t>(x);
    bits = x != x ? 0x7FC0 : (u + 0x7FFF + (u >> 16 & 1)) >> 16;
  }
  operator float() const { return std::bit_cast<float>(uint32_t(bits) << 16); }
};
struct uint3 { uint x, y, z; };
struct char4 { signed char x, y, z, w; };
template <class To, class From> To as_type(const From& x) { return std::bit_cast<To>(x); }
#define device
#define constant const
#define threadgroup static thread_local

namespace emu {
constexpr uint WIDTH = 32;
constexpr size_t BEYOND = 1 << 16;  // words after an array
enum Op { NONE, SIMD, GROUP, DONE };
struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  Op op = NONE;
  int kind = 0;  // which operation of a SIMD group
  uint64_t value = 0;
  uint64_t* gathered = nullptr;
  uint3 in_group{}, group{}, in_grid{};
  uint lane = 0, simd = 0, simds = 0;
};
inline thread_local Fiber* now;
inline thread_local ucontext_t scheduler;
inline thread_local uint64_t results[64][WIDTH];
inline thread_local std::function<void()>* entry;

inline void stop(Op op, int kind) {
  now->op = op;
  now->kind = kind;
  swapcontext(&now->context, &scheduler);
}
template <class T> const uint64_t* exchange(T x, int kind) {
  static_assert(sizeof(T) <= 8);
  now->value = 0;
  std::memcpy(&now->value, &x, sizeof(T));
  stop(SIMD, kind);
  return now->gathered;
}
template <class T> T unpack(uint64_t u) {
  T x;
  std::memcpy(&x, &u, sizeof(T));
  return x;
}
inline void start() {
  (*entry)();
  now->op = DONE;
  swapcontext(&now->context, &scheduler);
}

// Lets SIMD groups and the threadgroup go on whose threads have all arrived. Returns whether all
// threads are done.
inline bool meet(std::vector<Fiber>& fibers, uint count, uint simds) {
  bool all_done = true, all_at_barrier = true, moved = false;
  for (uint s = 0; s < simds; s++) {
    const uint first = s * WIDTH, last = std::min(count, first + WIDTH);
    bool here = true;
    for (uint i = first; i < last; i++) {
      all_done &= fibers[i].op == DONE;
      all_at_barrier &= fibers[i].op == GROUP;
      here &= fibers[i].op == SIMD && fibers[i].kind == fibers[first].kind;
    }
    if (!here) continue;
    std::fill(results[s], results[s] + WIDTH, 0);
    for (uint i = first; i < last; i++) {
      results[s][i - first] = fibers[i].value;
      fibers[i].gathered = results[s];
      fibers[i].op = NONE;
    }
    moved = true;
  }
  if (all_at_barrier) {
    for (uint i = 0; i < count; i++) fibers[i].op = NONE;
  } else if (!moved && !all_done) {
    throw "threads diverge at an operation of a SIMD group or at a barrier";
  }
  return all_done;
}

// Runs `body` in every thread of the grid. Threadgroups at its edge are smaller.
inline void dispatch(uint3 grid, uint3 group, std::function<void()> body, uint64_t seed) {
  entry = &body;
  std::mt19937_64 random(seed);
  const uint3 groups{(grid.x + group.x - 1) / group.x, (grid.y + group.y - 1) / group.y,
                     (grid.z + group.z - 1) / group.z};
  std::vector<uint> order(groups.x * groups.y * groups.z);
  for (size_t i = 0; i < order.size(); i++) order[i] = i;
  std::shuffle(order.begin(), order.end(), random);
  std::vector<Fiber> fibers(group.x * group.y * group.z);
  for (auto& f : fibers) f.stack.resize(128 << 10);
  for (uint number : order) {
    const uint3 at{number % groups.x, number / groups.x % groups.y, number / groups.x / groups.y};
    const uint3 size{std::min(group.x, grid.x - at.x * group.x),
                     std::min(group.y, grid.y - at.y * group.y),
                     std::min(group.z, grid.z - at.z * group.z)};
    const uint count = size.x * size.y * size.z, simds = (count + WIDTH - 1) / WIDTH;
    for (uint i = 0; i < count; i++) {
      Fiber& f = fibers[i];
      f.in_group = {i % size.x, i / size.x % size.y, i / size.x / size.y};
      f.group = at;
      f.in_grid = {at.x * group.x + f.in_group.x, at.y * group.y + f.in_group.y,
                   at.z * group.z + f.in_group.z};
      f.lane = i % WIDTH;
      f.simd = i / WIDTH;
      f.simds = simds;
      f.op = NONE;
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = f.stack.data();
      f.context.uc_stack.ss_size = f.stack.size();
      f.context.uc_link = nullptr;
      makecontext(&f.context, start, 0);
    }
    std::vector<uint> turns(count);
    for (uint i = 0; i < count; i++) turns[i] = i;
    do {
      std::shuffle(turns.begin(), turns.end(), random);
      for (uint i : turns) {
        if (fibers[i].op != NONE) continue;
        now = &fibers[i];
        swapcontext(&scheduler, &now->context);
      }
    } while (!meet(fibers, count, simds));
  }
}

// Runs a kernel on copies of its arrays, which NaN follows. Inputs must stay as they are. Returns
// what is wrong, or null.
inline const char* run(void** arrays, const size_t* sizes, size_t inputs, size_t count,
                       const uint* grid, uint64_t seed, std::function<void(void**)> body) {
  std::vector<std::vector<uint64_t>> copies(count);
  std::vector<void*> pointers(count);
  for (size_t i = 0; i < count; i++) {
    copies[i].assign(sizes[i] / 8 + BEYOND, ~uint64_t(0));
    pointers[i] = copies[i].data();
    std::memcpy(pointers[i], arrays[i], sizes[i]);
  }
  try {
    dispatch({grid[0], grid[1], grid[2]}, {grid[3], grid[4], grid[5]},
             [&] { body(pointers.data()); }, seed);
  } catch (const char* why) {
    return why;
  }
  for (size_t i = 0; i < count; i++) {
    if (i >= inputs) std::memcpy(arrays[i], pointers[i], sizes[i]);
    else if (std::memcmp(arrays[i], pointers[i], sizes[i])) return "an input was written";
  }
  return nullptr;
}
}  // namespace emu

namespace mem_flags { constexpr int mem_threadgroup = 2; }
inline void threadgroup_barrier(int) { emu::stop(emu::GROUP, 0); }
template <class T> T simd_shuffle_xor(T x, ushort mask) {
  const uint lane = emu::now->lane;
  return emu::unpack<T>(emu::exchange(x, 1)[lane ^ mask]);
}
template <class T> T simd_max(T x) {
  const uint64_t* all = emu::exchange(x, 2);
  T found = emu::unpack<T>(all[0]);
  for (uint i = 1; i < emu::WIDTH; i++) found = std::max(found, emu::unpack<T>(all[i]));
  return found;
}
namespace metal {
template <class T> T max(T a, T b) { return a > b ? a : b; }
template <class T> T min(T a, T b) { return a < b ? a : b; }
inline float abs(float x) { return std::fabs(x); }
inline float rint(float x) { return std::nearbyint(x); }
namespace fast { inline float exp(float x) { return std::exp(x); } }
}  // namespace metal
