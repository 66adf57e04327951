"""The rnn engine: recurrent layers, and which algorithm runs them. The public names are in weft and weft.nn."""
