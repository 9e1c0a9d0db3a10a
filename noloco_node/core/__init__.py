"""Pure: the maths, the codecs and the round's state machine; no IO, no clock, no chance of their own."""
