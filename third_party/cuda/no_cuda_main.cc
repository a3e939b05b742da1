// The main function of a cuda_binary on a machine without a CUDA toolkit.
#include <cstdio>

int main() {
  std::fprintf(stderr, "this program needs a gpu, and this build has no cuda\n");
  return 1;
}
