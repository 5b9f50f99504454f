"""The engine process: data channels, codecs, sums, outer step, hashes, snapshots. It decides nothing."""
