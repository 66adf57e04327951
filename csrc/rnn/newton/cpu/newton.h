// backward="newton" on the CPU: its forward pass.
//
// The chunks of a sequence are rows of the batch in the kernel that walks step by step: beside few sequences, whose
// steps wait for one product after the other, they come nearly for free. What is walked again is walked in pieces, of
// whose steps only those up to the meeting are stored.
#pragma once
#include <functional>

#include "rnn/rnn.h"

namespace weft::rnn {

// The forward pass step by step, in the accumulate type: cells and gates where they are asked for, else (0).
using WalkRows = std::function<RnnResults(const RnnArgs&, const RnnSizes&, bool keep_cells, bool save)>;

// Into how many chunks a padded problem is cut; 1 where it is walked as it is.
int64_t newton_chunks_cpu(const RnnSizes& sizes);

// The forward pass in more than one chunk: results as allocate_rnn makes them, in the accumulate type.
RnnResults newton_forward_cpu(const RnnArgs& args, const RnnSizes& sizes, int64_t chunks, bool keep_cells, bool save,
                              const WalkRows& walk);

}  // namespace weft::rnn
