"""Shape rules: what each op returns for fake tensors, symbolic shapes included."""
