"""Images that share a row of a batch, one behind the other (NaViT, arXiv:2307.06304)."""

from vit_jax.data.loader import Batch, Loader


class PackedLoader(Loader):
    """Loads images whose last transform has `packs` of them share a row."""

    def fill(self, batch: Batch, row: int, record: int, position: int) -> None:
        """Loads the image of a number behind those that it shares a row with."""
        line, place = divmod(row, self.packs)
        strip, grids = batch["image"][line], batch["grids"][line]
        side = strip.shape[1]
        used = int(grids.prod(-1).sum())
        left = len(strip) // side - used
        one = self.ending_in(self.ops[-1].of_share(left, self.packs - place))
        for name, values in one.load_next(record, position).items():
            if name not in self.shapes:
                batch[name][row] = values
            elif name == "grids":
                grids[place] = values[0]
            else:
                strip[used * side :][: len(values)] = values
