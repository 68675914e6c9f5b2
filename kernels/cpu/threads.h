// The threads of one call and their scratch memory. Included by entry points alone, which are compiled once: kernels
// of an instruction set know no threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

namespace octavo {

// Memory that is kept between uses: a fresh allocation of this size would fault its pages in every time.
class Scratch {
 public:
  // At a 64-byte boundary, of arbitrary contents; null where the memory cannot be had.
  float* floats(int64_t count) {
    if (!buffer_ || count > capacity_) {
      const size_t lines = (static_cast<size_t>(count) * sizeof(float) + 63) / 64;
      buffer_.reset(static_cast<float*>(std::aligned_alloc(64, 64 * std::max<size_t>(1, lines))));
      capacity_ = buffer_ ? count : 0;
    }
    return buffer_.get();
  }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> buffer_;
  int64_t capacity_ = 0;
};

// Scratch of the thread that calls, for one use at a time.
inline float* thread_scratch(int64_t floats) {
  thread_local Scratch scratch;
  return scratch.floats(floats);
}

// What the threads of one parallel region share: they run the same loops in the same order, and wait after each.
class Team {
 public:
  Team(int num_threads, int64_t most_loops) : num_threads(num_threads), next_(most_loops * num_threads) {}

  // Called by every thread with the same arguments and with `loop`, the number of loops that it has run: runs body(i)
  // for every i in [0, count), and returns when all are done. A thread begins with its own part of the range, whose
  // data the same part of the loop before has left in the caches of its core, and then helps the others.
  template <typename Body>
  void for_each(int64_t& loop, int64_t thread, int64_t count, const Body& body) {
    Counter* next = next_.data() + loop++ * num_threads;
    for (int64_t k = 0; k < num_threads; ++k) {
      const int64_t part = (thread + k) % num_threads, begin = count * part / num_threads;
      const int64_t size = count * (part + 1) / num_threads - begin;
      for (int64_t i = next[part].value++; i < size; i = next[part].value++) body(begin + i);
    }
    wait();
  }

  // Returns when every thread has come here.
  void wait() const {
    if (num_threads > 1) {
#pragma omp barrier
    }
  }

  const int num_threads;

 private:
  struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
  };
  std::vector<Counter> next_;
};

// Runs body(i) for every i in [0, count) on `num_threads` threads, which take the next index as they get free.
template <typename Body>
void parallel_for(int64_t count, int num_threads, const Body& body) {
  if (count <= 1 || num_threads <= 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  std::atomic<int64_t> next{0};
  // Always the whole team: libgomp ends the threads that a smaller one leaves over, and their scratch with them.
#pragma omp parallel num_threads(num_threads)
  for (int64_t i = next++; i < count; i = next++) body(i);
}

// Runs body(row) for every row, in chunks worth waking a thread for; `row_size` is the work of one row in elements.
template <typename Body>
void parallel_for_rows(int64_t num_rows, int64_t row_size, int num_threads, const Body& body) {
  constexpr int64_t elements_per_chunk = 16384;
  const int64_t rows_per_chunk = std::max<int64_t>(1, elements_per_chunk / std::max<int64_t>(1, row_size));
  parallel_for((num_rows + rows_per_chunk - 1) / rows_per_chunk, num_threads, [&](int64_t chunk) {
    const int64_t end = std::min(num_rows, (chunk + 1) * rows_per_chunk);
    for (int64_t row = chunk * rows_per_chunk; row < end; ++row) body(row);
  });
}

}  // namespace octavo
