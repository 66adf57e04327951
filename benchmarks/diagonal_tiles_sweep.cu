// Times the diagonal scan and its gradients by pointers, beside a copy, and holds them against a walk in fp64.
// nvcc -std=c++20 -O3 -arch=sm_90a --expt-relaxed-constexpr -I<tree>/csrc [-DWEFT_TILE_...] sweep.cu -o sweep
#include <algorithm>
#include <cstdio>
#include <vector>

#include "scan/cuda/linear_scan_diagonal.cu"

using namespace weft;
using namespace weft::scan;

template <typename T>
__global__ void fill(T* p, int64_t n, unsigned seed, float low, float high) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll) {
    uint64_t z = (i + 1) * 0x9E3779B97F4A7C15ull + seed * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    p[i] = from_state<T>(State<T>(low + (high - low) * float((z >> 40) * 0x1p-24)));
  }
}
// One lane per channel in fp64: the largest error of x, lambda and the gradient of A, relative to 1.
template <typename T>
__global__ void check(const T* A, const T* b, const T* w, const T* x, const T* gA, const T* gb, int64_t T_, int64_t H,
                      float* worst) {
  const int64_t h = blockIdx.x * 32ll + threadIdx.x;
  if (h >= H) return;
  double s = 0, error = 0;
  auto off = [&](double got, double want) { error = fmax(error, isfinite(got) ? fabs(got - want) / (1 + fabs(want)) : 9.); };
  for (int64_t t = 0; t < T_; ++t) {
    s = double(to_state(b[t * H + h])) + (t ? double(to_state(A[t * H + h])) * s : 0);
    off(to_state(x[t * H + h]), s);
  }
  s = 0;
  for (int64_t t = T_ - 1; t >= 0; --t) {
    s = double(to_state(w[t * H + h])) + (t + 1 < T_ ? double(to_state(A[(t + 1) * H + h])) * s : 0);
    off(to_state(gb[t * H + h]), s);
    off(to_state(gA[t * H + h]), t ? s * double(to_state(x[(t - 1) * H + h])) : 0);
  }
  atomicMax(reinterpret_cast<int*>(worst), __float_as_int(float(error)));
}

template <typename T>
void measure(const char* name, DType dtype, int64_t T_, int64_t H) {
  const int64_t n = T_ * H;
  T* p[7];
  for (auto& q : p) cuda_check(cudaMalloc(&q, n * sizeof(T)), "malloc");
  T *A = p[0], *b = p[1], *w = p[2], *x = p[3], *gA = p[4], *gb = p[5], *spare = p[6];
  fill<<<1024, 256>>>(A, n, 1u, .8f, 1.f);
  fill<<<1024, 256>>>(b, n, 2u, -1.7f, 1.7f);
  fill<<<1024, 256>>>(w, n, 3u, -1.7f, 1.7f);
  for (T* q : {x, gA, gb}) cudaMemset(q, 0xff, n * sizeof(T));
  void* memory;
  size_t room = 64 << 20;
  cuda_check(cudaMalloc(&memory, room), "malloc");
  const Workspace workspace = [&](size_t bytes) {
    if (bytes > room) printf("workspace of %zu bytes\n", bytes), exit(1);
    return memory;
  };
  LinearScan s{};
  s.A = A, s.A_t = H, s.A_b = H, s.A_row = 1, s.b = b, s.b_t = H, s.b_b = H, s.out = x, s.out_t = H, s.out_b = H;
  s.T = T_, s.B = 1, s.H = H, s.dtype = dtype;
  DiagonalGradients g{};
  g.scan = s;
  g.scan.A = A + T_ * H, g.scan.A_t = -H, g.scan.b = w + (T_ - 1) * H, g.scan.b_t = -H;
  g.scan.out = gb + (T_ - 1) * H, g.scan.out_t = -H;
  g.x = x + (T_ - 2) * H, g.x_t = -H, g.x_b = H, g.grad_A = gA + (T_ - 1) * H, g.grad_A_t = -H, g.grad_A_b = H;
  cudaEvent_t from, to;
  cudaEventCreate(&from), cudaEventCreate(&to);
  auto time = [&](auto&& f) {
    std::vector<float> all;
    for (int i = 0; i < 25; ++i) {
      cudaEventRecord(from);
      f();
      cudaEventRecord(to);
      cuda_check(cudaEventSynchronize(to), "run");
      float ms;
      cudaEventElapsedTime(&ms, from, to);
      if (i >= 5) all.push_back(ms);
    }
    std::sort(all.begin(), all.end());
    return all[all.size() / 2];
  };
  const float forward = time([&] { linear_scan_diagonal(s, workspace, 0); });
  const float backward = time([&] { linear_scan_diagonal_gradients(g, workspace, 0); });
  const float both = time([&] {
    linear_scan_diagonal(s, workspace, 0);
    linear_scan_diagonal_gradients(g, workspace, 0);
  });
  const float copy = time([&] { cudaMemcpyAsync(spare, A, n * sizeof(T), cudaMemcpyDeviceToDevice, 0); }) / 2;
  float *worst, error;
  cudaMalloc(&worst, 4), cudaMemset(worst, 0, 4);
  check<<<(H + 31) / 32, 32>>>(A, b, w, x, gA, gb, T_, H, worst);
  cuda_check(cudaMemcpy(&error, worst, 4, cudaMemcpyDeviceToHost), "check");
  printf("%s T %6ld H %5ld  forward %.4f (%.2f of floor)  backward %.4f (%.2f)  both %.4f (%.2f)  error %.1e\n", name,
         long(T_), long(H), forward, 3 * copy / forward, backward, 5 * copy / backward, both, 8 * copy / both, error);
  fflush(stdout);
  for (auto q : p) cudaFree(q);
  cudaFree(memory), cudaFree(worst);
}

int main() {
  for (int64_t T : {65536, 16384, 4096}) measure<float>("fp32", DType::f32, T, 768);
  for (int64_t T : {65536, 16384}) measure<__nv_bfloat16>("bf16", DType::bf16, T, 768);
  measure<__half>("fp16", DType::f16, 65536, 768);
  measure<double>("fp64", DType::f64, 65536, 384);
}
