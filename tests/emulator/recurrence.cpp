// The recurrence kernel of weft::rnn as a function, for the macros that it is compiled with.
#include "emulator.h"
#include "rnn/persistent/cuda/recurrence.jit.cu"

using namespace weft;
using namespace weft::rnn;

static const Args* arguments;

extern "C" void run(const Args* args, int blocks, int cluster, const unsigned char* exchanged, long exchanged_bytes,
                    unsigned seed) {
  arguments = args;
  exchanged_begin = exchanged;
  exchanged_end = exchanged + exchanged_bytes;
  emulator::launch([] { recurrence(*arguments); }, blocks, kThreads, cluster, kSharedBytes, seed);
}
