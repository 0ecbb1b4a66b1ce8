"""Operations with a plain reference, a CPU path and one function that picks."""
