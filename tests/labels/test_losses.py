"""torch's losses of labelled tensors are those of the aligned data."""

import pytest
import torch
import torch.nn.functional as F

import moduli as mo

LOGITS = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TARGET = torch.tensor([[0, 2, 1, -100, 0], [1, 1, 1, 2, 0], [2, 2, 0, 0, 1], [0, 1, 2, 0, 1]])


def logits():
    return mo.tensor(LOGITS, "item kind place", item=list("abcd"), kind=["cat", "dog", "owl"])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_of_classes(reduction):
    target = mo.tensor(TARGET, "item place", item=list("abcd"))
    result = F.cross_entropy(logits(), target, reduction=reduction)
    torch.testing.assert_close(result.data, F.cross_entropy(LOGITS, TARGET, reduction=reduction))


def test_cross_entropy_aligns_the_target():
    target = mo.tensor(TARGET.flip(0).T, "place item", item=list("dcba"))
    torch.testing.assert_close(F.cross_entropy(logits(), target).data, F.cross_entropy(LOGITS, TARGET))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_of_probabilities(reduction):
    share = torch.softmax(LOGITS.flip(0), 1)
    target = mo.tensor(share[:, [2, 0, 1]], "item kind place", item=list("abcd"), kind=["owl", "cat", "dog"])
    result = F.cross_entropy(logits(), target, reduction=reduction)
    torch.testing.assert_close(result.data, F.cross_entropy(LOGITS, share, reduction=reduction))


def test_cross_entropy_of_one_item():
    result = F.cross_entropy(mo.tensor(LOGITS[0, :, 0], kind=["cat", "dog", "owl"]), torch.tensor(2))
    torch.testing.assert_close(result.data, F.cross_entropy(LOGITS[0, :, 0], torch.tensor(2)))


def test_cross_entropy_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="does not fit"):
        F.cross_entropy(logits(), mo.tensor(TARGET, "item where", item=list("abcd")))
    with pytest.raises(ValueError, match="only on the right"):
        F.cross_entropy(logits(), mo.tensor(TARGET, "item place", item=list("abce")))
    with pytest.raises(TypeError, match="ignore_index and reduction alone"):
        F.cross_entropy(logits(), mo.tensor(TARGET, "item place"), label_smoothing=0.1)


def test_gradients_and_compiled_code():
    leaf = LOGITS.clone().requires_grad_()
    target = mo.tensor(TARGET, "item place", item=list("abcd"))
    x = mo.tensor(leaf, "item kind place", item=list("abcd"), kind=["cat", "dog", "owl"])
    loss = torch.compile(lambda a: F.cross_entropy(a, target), fullgraph=True, backend="eager")(x)
    loss.backward()
    plain = LOGITS.clone().requires_grad_()
    F.cross_entropy(plain, TARGET).backward()
    torch.testing.assert_close(leaf.grad, plain.grad)


def test_keywords_are_understood_as_torch_spells_them():
    t = logits()
    assert torch.equal(torch.sum(t, axis=0).data, LOGITS.sum(0))
    assert torch.equal(torch.argmax(input=t, dim=1).data, LOGITS.argmax(1))
    assert torch.equal(torch.add(input=t, other=t).data, LOGITS + LOGITS)
