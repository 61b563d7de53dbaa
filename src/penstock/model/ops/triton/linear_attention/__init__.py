"""Linear attention: the gated delta rule on recurrent states."""
