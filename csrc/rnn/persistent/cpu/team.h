// Threads that run at the same time and wait for each other, which at::parallel_for does not promise.
#pragma once
#include <ATen/Parallel.h>
#include <c10/util/ParallelGuard.h>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace weft::rnn {

// Threads that a team may have where it is called from: 1 inside another parallel region.
inline int team_limit() {
#ifdef _OPENMP
  return at::in_parallel_region() || omp_in_parallel() ? 1 : at::get_num_threads();
#else
  return 1;
#endif
}

// Calls work(member) for each member on a thread of its own, all at once. False, and nothing has run, where OpenMP
// gives fewer threads. `work` must not throw.
template <typename F>
bool run_team(int members, const F& work) {
  if (members == 1) {
    work(0);
    return true;
  }
  bool enough = false;
#ifdef _OPENMP
  // No num_threads clause: a region of another size makes OpenMP end threads and start new ones.
#pragma omp parallel
  {
    const int member = omp_get_thread_num();
    if (omp_get_num_threads() >= members) {
      if (member == 0) enough = true;
      if (member < members) {
        const c10::ParallelGuard guard(true);
        work(member);
      }
    }
  }
#endif
  return enough;
}

}  // namespace weft::rnn
