"""How clients take their steps: by autograd, by hand, as a stack (vmap), as a GPU program."""
