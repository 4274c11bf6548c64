"""The 1,000 classes of ImageNet (ILSVRC 2012), and ObjectNet's classes among them.

Labels number the synsets of WordNet in alphabetical order; so do ReaL's
(arXiv:2006.07159). The names are the first words of each synset; two that would be
equal are changed. For texts, CLIP uses other names for 363 classes, two of them twice
(openai/CLIP, notebooks/Prompt_Engineering_for_ImageNet.ipynb, copied in
google-research/big_vision 0127fb6); they are the third column of imagenet_classes.tsv.
"""

import functools
import importlib.resources
import re
from collections.abc import Sequence

from vit_jax.errors import UserError

NUM_CLASSES = 1_000
# Mean and deviation of the training images, with which PyTorch's models normalise.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLIP, WORDNET = "clip", "wordnet"  # Sources of class names for texts.

# A WordNet id, possibly with a name, as in "n02085620-Chihuahua".
_ID = re.compile(r"(n\d{8})(?:[\s_-]+(.+))?")


@functools.cache
def _rows() -> tuple[tuple[str, str, str], ...]:
    path = importlib.resources.files("vit_jax.data") / "imagenet_classes.tsv"
    rows = (line.split("\t") for line in path.read_text("utf-8").splitlines())
    return tuple((synset, *names[:1], names[-1]) for synset, *names in rows)


def synsets() -> tuple[str, ...]:
    """Returns the WordNet id of each class, such as "n01440764"."""
    return tuple(synset for synset, _, _ in _rows())


def class_names() -> tuple[str, ...]:
    """Returns the name of each class, such as "tench"."""
    return tuple(name for _, name, _ in _rows())


def in_words(names: Sequence[str], whose: str = CLIP) -> tuple[str, ...]:
    """Returns names of classes for texts: WordNet ids are replaced by words.

    An id of ImageNet-1k is replaced by the name of its class; any other id is removed
    from a name such as "n02085620-Chihuahua".

    Args:
      names: names of classes of any data set.
      whose: CLIP, or WORDNET for the names of `class_names`.

    Raises:
      UserError: a name is only an id, which is not of ImageNet-1k.
    """
    known = {
        synset: of_clip if whose == CLIP else word for synset, word, of_clip in _rows()
    }

    def word(name: str) -> str:
        match = _ID.fullmatch(name)
        if not match:
            return name
        wordnet_id, rest = match.groups()
        if wordnet_id not in known and not rest:
            raise UserError(
                f"class {name!r} is a WordNet id that is not of ImageNet-1k, and texts need "
                "words: give the names of the classes"
            )
        return known.get(wordnet_id) or rest.replace("_", " ")

    return tuple(map(word, names))


# ObjectNet's 113 classes that overlap ImageNet-1k, and their ImageNet numbers.
#
# Source: imagenet_pytorch_id_to_objectnet_id.json and folder_to_imagenet_1k.json of the
# authors' github.com/abarbu/objectnet-template-tensorflow (Barbu et al., NeurIPS 2019).
# ImageNet numbers count the classes in the order of their WordNet ids, as in TFDS and
# the published checkpoints. Each entry: the class's folder in ObjectNet, and the
# numbers of the ImageNet classes that count as right.
_OBJECTNET = """
alarm_clock 409,530; backpack 414; banana 954; band_aid 419; basket 790;
beer_bottle 440; bench 703; bicycle 444,671; binder_closed 446; bottle_cap 455;
bread_loaf 930; broom 462; bucket 463; butchers_knife 499; can_opener 473;
candle 470; cellphone 487; chair 423,559,765; clothes_hamper 588;
coffee_french_press 550; combination_lock 507; computer_mouse 673; desk_lamp 846;
doormat 539; dress 578; dress_shoe_men 630; drill 740; drinking_cup 968;
drying_rack_for_dishes 729; envelope 549; fan 545; frying_pan 567;
full_sized_towel 434; hair_dryer 589; hammer 587; hand_towel_or_rag 533;
helmet 518,560; iron_for_clothes 606; jeans 608; keyboard 508; ladle 618;
lampshade 619; laptop_open 620; lemon 951; letter_opener 623; lighter 626;
lipstick 629; match 644; measuring_cup 647; microwave 651; mixing_salad_bowl 659;
monitor 664; mug 504; nail_fastener 677; necklace 679; orange 950; padlock 695;
paintbrush 696; paper_towel 700; pen 418,563,749; pill_bottle 720; pillow 721;
pitcher 725; plastic_bag 728; plate 923; plunger 731; pop_can 737;
portable_heater 811; printer 742; remote_control 761; ruler 769; running_shoe 770;
safety_pin 772; salt_shaker 773; sandal 774; screw 783; shovel 792;
skirt 601,655,689; sleeping_bag 797; soap_dispenser 804; sock 806; soup_bowl 809;
spatula 813; speaker 632; still_camera 732,759; strainer 828; stuffed_animal 850;
suit_jacket 834; sunglasses 837; sweater 841; swimming_trunks 842; t-shirt 610;
teapot 849; tennis_racket 752; tie 457,906; toaster 859; toilet_paper_roll 999;
trash_bin 412; tray 868; tv 851; umbrella 879; vacuum_cleaner 882; vase 883;
wallet 893; watch 531; water_bottle 898; weight_exercise 543; weight_scale 778;
wheel 479,694; whistle 902; wine_bottle 907; winter_glove 658; wok 909
"""

OBJECTNET_CLASSES = {
    name: tuple(int(number) for number in numbers.split(","))
    for name, numbers in (entry.split() for entry in _OBJECTNET.split(";"))
}
