"""What every scenario of fill-in-the-middle needs. The model is random: any text will do."""

PREFIX, SUFFIX = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"
FEW, MANY = 12, 1500
