"""A weight as 4- or 8-bit codes in groups along its inputs, laid out for products of many rows at once.

Owns the layout and its plain torch meaning; the native kernels read it, loaders fill it. Knows no files and no model.
"""

from dataclasses import dataclass

import torch

PANEL = 16  # outputs that lie side by side: the lanes of a 512-bit vector of int32
STEP = 4  # consecutive inputs of one output that a dot-product instruction takes at once
GROUP_SIZE = 32  # inputs that share a scale, as in the blocks of GGUF files
CODE_CENTRE = 128  # the 8-bit code of zero


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Weight of a linear layer, [out_features, in_features]: value = scale * code + minimum.

    A 4-bit weight has a scale and a minimum for each group of inputs. An 8-bit one has codes around CODE_CENTRE, so
    that its minimum is -CODE_CENTRE * scale, and a scale for each group or one for each output. Panel p holds the
    outputs from p * PANEL on; what lies past the last output counts as zero.

    Attributes:
        codes: [num_panels, num_groups, GROUP_SIZE * PANEL * bits / 8] uint8, contiguous. Of 8 bits, byte
            (s * PANEL + o) * STEP + i of a panel's group is input s * STEP + i of the group and output o of the panel.
            Of 4 bits, byte (s * PANEL + o) * STEP + i holds steps 2 s (low half) and 2 s + 1 (high half).
        scales: [num_panels, num_groups, PANEL] float16, contiguous; [num_panels, 1, PANEL] of one for each output.
        minimums: the same of a 4-bit weight; None of an 8-bit one.
        out_features: rows of the weight.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor | None
    out_features: int

    @property
    def bits(self) -> int:
        """Of a code."""
        return 8 if self.minimums is None else 4

    @property
    def in_features(self) -> int:
        """Columns of the weight."""
        return self.codes.shape[1] * GROUP_SIZE

    @property
    def num_bytes(self) -> int:
        """Bytes that a product reads."""
        parts = (self.codes, self.scales) if self.minimums is None else (self.codes, self.scales, self.minimums)
        return sum(part.nbytes for part in parts)

    def dequantize(self) -> torch.Tensor:  # [out_features, in_features] float32
        """The values that the codes stand for."""
        num_panels, num_groups, _ = self.codes.shape
        steps = self.codes.view(num_panels, num_groups, -1, PANEL, STEP)
        if self.bits == 4:
            steps = torch.stack((steps & 15, steps >> 4), dim=3).flatten(2, 3)
        codes = steps.permute(0, 3, 1, 2, 4).reshape(num_panels, PANEL, num_groups, GROUP_SIZE).float()
        scales = self.scales.float().transpose(1, 2)[..., None]  # [num_panels, PANEL, num_groups or 1, 1]
        if self.minimums is None:
            values = (codes - CODE_CENTRE) * scales
        else:
            values = codes * scales + self.minimums.float().transpose(1, 2)[..., None]
        return values.reshape(num_panels * PANEL, self.in_features)[: self.out_features]


def pack(
    codes: torch.Tensor,  # [out_features, in_features] uint8
    scales: torch.Tensor,  # [out_features, num_groups]; [out_features, 1] = one for each output
    minimums: torch.Tensor | None,  # [out_features, num_groups]; None = 8-bit codes around CODE_CENTRE
) -> QuantizedWeight:
    """Lay codes out in panels. With minimums the codes must be below 16."""
    out_features, in_features = codes.shape
    num_groups = in_features // GROUP_SIZE
    assert in_features == num_groups * GROUP_SIZE and scales.shape[1] in (1, num_groups)
    padding = -out_features % PANEL
    panels = torch.nn.functional.pad(codes, (0, 0, 0, padding)).view(-1, PANEL, num_groups, GROUP_SIZE // STEP, STEP)
    steps = panels.permute(0, 2, 3, 1, 4)  # [num_panels, num_groups, GROUP_SIZE / STEP, PANEL, STEP]
    if minimums is not None:
        steps = steps[:, :, 0::2] | (steps[:, :, 1::2] << 4)

    def by_panel(x: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(x.half(), (0, 0, 0, padding))
        return padded.view(-1, PANEL, x.shape[1]).transpose(1, 2).contiguous()

    return QuantizedWeight(
        codes=steps.contiguous().view(len(panels), num_groups, -1),
        scales=by_panel(scales),
        minimums=None if minimums is None else by_panel(minimums),
        out_features=out_features,
    )


def quantize(weight: torch.Tensor, *, by_output: bool = False) -> QuantizedWeight:
    """Round a weight to 8-bit codes; see `round_to_codes`."""
    return pack(*round_to_codes(weight, by_output=by_output), None)


def round_to_codes(weight: torch.Tensor, *, by_output: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to 8-bit codes, symmetric around zero in each group, or in all inputs of an output.

    The scale is max|w| / 127 as float16 has it, and codes are relative to that rounded scale.

    Args:
        weight: [out_features, in_features], of any floating dtype.
        by_output: one scale for each output instead of one for each of its groups.

    Returns:
        Codes around CODE_CENTRE, [out_features, in_features] uint8, and scales, [out_features, num_groups] float16 (or
        [out_features, 1]).
    """
    groups = weight.float().unflatten(1, (-1, weight.shape[1] if by_output else GROUP_SIZE))
    largest = groups.abs().amax(dim=-1)
    scales = (largest / 127.0).half()
    # A subnormal float16 has few bits: where the nearest would cut off more than half a step, the next one up.
    scales = torch.where(largest > 127.5 * scales.float(), torch.nextafter(scales, scales.new_tensor(1.0)), scales)
    divisors = scales.float()[..., None]
    codes = torch.where(divisors > 0, groups / divisors, 0.0).round().clamp(-127, 127)
    return (codes + CODE_CENTRE).to(torch.uint8).flatten(1), scales
