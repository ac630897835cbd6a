"""The words of the project's own tasks: names, places, things, events, capitals, and the sentences they are put into.

Each word follows a space, so that it can be one token. Which of them are is for a model's tokenizer to say.
"""

# fmt: off
# One word a line would make a page of each.
NAMES = (
    "Adam", "Alan", "Alice", "Amy", "Andrew", "Anna", "Anne", "Ben", "Beth", "Brian", "Carl", "Carol", "Charles",
    "Clara", "Claire", "Daniel", "David", "Diana", "Edward", "Ellen", "Emily", "Emma", "Eric", "Eva", "Frank",
    "Fred", "George", "Harry", "Helen", "Henry", "Hugh", "Ian", "Jack", "Jacob", "James", "Jane", "Jason", "Jean",
    "Joan", "John", "Joseph", "Julia", "Karen", "Kate", "Kevin", "Laura", "Leo", "Linda", "Lisa", "Louis", "Lucy",
    "Maria", "Martin", "Mary", "Matthew", "Michael", "Nancy", "Neil", "Nina", "Oliver", "Oscar", "Paul", "Peter",
    "Philip", "Rachel", "Ralph", "Richard", "Robert", "Ruth", "Ryan", "Sarah", "Simon", "Sophie", "Stephen",
    "Susan", "Thomas", "Tom", "Victor", "Walter", "William",
)

EVENTS = (
    "alliance", "blockade", "conflict", "construction", "crusade", "dispute", "drought", "dynasty", "expedition",
    "famine", "feud", "mission", "occupation", "plague", "project", "rebellion", "siege", "strike", "struggle",
    "truce", "voyage", "war",
)
# fmt: on

PLACES = ("bakery", "bridge", "garden", "harbor", "library", "market", "museum", "office", "school", "station")

THINGS = ("basket", "book", "box", "coat", "key", "lamp", "letter", "map", "ring", "ticket")

NOUNS = (
    *PLACES, *THINGS, "apple", "baby", "ball", "bank", "bed", "bell", "bird", "boat", "bone", "bottle", "bowl", "boy",
    "bus", "cake", "camera", "car", "card", "castle", "cat", "chair", "church", "city", "cloud", "computer", "cow",
    "crowd", "cup", "desk", "doctor", "dog", "door", "dress", "egg", "engine", "farm", "field", "fire", "fish", "flag",
    "flower", "forest", "fruit", "game", "gift", "girl", "glass", "hat", "hill", "horse", "hotel", "house", "image",
    "king", "knife", "lake", "machine", "mirror", "moon", "mountain", "nurse", "ocean", "phone", "plane", "plant",
    "queen", "river", "road", "ship", "shop", "snake", "soldier", "star", "stone", "storm", "sun", "table", "teacher",
    "tower", "train", "tree", "village", "wall", "wheel", "window", "wolf",
)  # fmt: skip
"""What one can see."""

GIVING = (
    "When {first} and {second} met at the {place}, {giver} handed the {thing} to",
    "After {first} and {second} had left the {place}, {giver} gave a {thing} to",
    "While {first} and {second} were waiting near the {place}, {giver} passed the {thing} to",
    "Because {first} and {second} came late to the {place}, {giver} offered a {thing} to",
    "Yesterday {first} and {second} stayed at the {place} all day, and {giver} sold a {thing} to",
    "Once {first} and {second} were alone in the {place}, {giver} decided to show the {thing} to",
)
"""Two people, then one of them gives the other something."""

LASTING = "The {event} lasted from the year {century}{year} to the year {century}"

CENTURIES = tuple(range(11, 19))

CAPITALS = {
    "Afghanistan": "Kabul",
    "Algeria": "Algiers",
    "Australia": "Canberra",
    "Austria": "Vienna",
    "Belgium": "Brussels",
    "Bulgaria": "Sofia",
    "Canada": "Ottawa",
    "Chile": "Santiago",
    "China": "Beijing",
    "Croatia": "Zagreb",
    "Cuba": "Havana",
    "Denmark": "Copenhagen",
    "Egypt": "Cairo",
    "England": "London",
    "Finland": "Helsinki",
    "France": "Paris",
    "Germany": "Berlin",
    "Ghana": "Accra",
    "Greece": "Athens",
    "Hungary": "Budapest",
    "Indonesia": "Jakarta",
    "Iran": "Tehran",
    "Iraq": "Baghdad",
    "Ireland": "Dublin",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Lebanon": "Beirut",
    "Norway": "Oslo",
    "Peru": "Lima",
    "Philippines": "Manila",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Romania": "Bucharest",
    "Russia": "Moscow",
    "Scotland": "Edinburgh",
    "Serbia": "Belgrade",
    "Spain": "Madrid",
    "Sweden": "Stockholm",
    "Switzerland": "Bern",
    "Syria": "Damascus",
    "Thailand": "Bangkok",
    "Turkey": "Ankara",
    "Venezuela": "Caracas",
    "Vietnam": "Hanoi",
}

ASKING = (
    "The capital of {country} is",
    "If you travel to the capital of {country}, you will find yourself in",
    "The government of {country} has its seat in the city of",
)
"""Sentences that ask for a capital."""
