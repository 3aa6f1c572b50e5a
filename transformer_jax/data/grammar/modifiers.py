"""Adjectives, adverbs, months, weekdays, conjunctions and modal verbs, one a line.

Adjectives: English, German (with its attributive stem where it differs), a group, the noun classes it fits. Two
adjectives of one group are never said of one thing, so nothing is "cheap, but expensive".
"""

QUICKSTART_ADJECTIVES = """
small klein size concrete place
big groß size concrete place
old alt age concrete place
new neu age thing place
young jung age animate
beautiful schön looks concrete place
ugly hässlich looks thing place
red rot color item container clothing vehicle furniture
blue blau color item container clothing vehicle furniture
green grün color item container clothing vehicle furniture
black schwarz color animal item container clothing vehicle furniture
white weiß color animal item container clothing vehicle furniture
expensive teuer/teur price thing
cheap billig price thing
dirty schmutzig state animal item container clothing vehicle furniture
clean sauber state item container clothing vehicle furniture
friendly freundlich manner animate
clever klug mind animate
hungry hungrig need animate
tired müde force animate
happy glücklich mood person
sad traurig mood person
heavy schwer weight item container text clothing furniture
"""

FURTHER_ADJECTIVES = """
yellow gelb color item container clothing vehicle furniture
brown braun color animal item container clothing vehicle furniture
gray grau color animal item container clothing vehicle furniture
light leicht weight item container text clothing furniture
rich reich wealth person
poor arm wealth person
famous berühmt fame person text place
strong stark force animate
weak schwach force animate
brave mutig courage animate
shy schüchtern courage animate
lazy faul zeal animate
hardworking fleißig zeal person
polite höflich manner person
loud laut sound animal device
quiet leise sound device
thirsty durstig need animate
angry wütend mood person
curious neugierig mind animate
wild wild temper animal
tame zahm temper animal
dangerous gefährlich danger animal vehicle place
harmless harmlos danger animal
fast schnell speed animal vehicle
slow langsam speed animal vehicle
round rund shape furniture
broken kaputt function device vehicle furniture
useful nützlich use item container device vehicle
useless nutzlos use item container device vehicle
full voll content container
empty leer content container
thick dick width text clothing
thin dünn width text clothing
long lang length text
short kurz length text
boring langweilig interest text place
exciting spannend interest text
warm warm warmth clothing food
cold kalt warmth food
fresh frisch freshness food
sweet süß taste food
dark dunkel/dunkl brightness place
bright hell brightness place
modern modern style furniture device place
strange seltsam oddness concrete place
healthy gesund health animate
sick krank health animate
"""

# English, German, English places (first, last, before the verb), tenses it goes with.
QUICKSTART_ADVERBS = """
today heute first,last present past future
now jetzt first present
often oft first,before present past perfect
sometimes manchmal first,before present past
always immer before present past perfect
"""

FURTHER_ADVERBS = """
yesterday gestern first,last past
tomorrow morgen first,last future
soon bald first future
rarely selten before present past perfect
never nie before present past perfect
suddenly plötzlich first past
perhaps vielleicht first present past perfect future
unfortunately leider first present past perfect future
here hier first present past future
there dort first present past future
"""

MONTHS = """
January Januar
February Februar
March März
April April
May Mai
June Juni
July Juli
August August
September September
October Oktober
November November
December Dezember
"""

WEEKDAYS = """
Monday Montag
Tuesday Dienstag
Wednesday Mittwoch
Thursday Donnerstag
Friday Freitag
Saturday Samstag
Sunday Sonntag
"""

# English, German, tenses of both clauses it joins. All of them send the German verb to the end.
QUICKSTART_SUBORDINATORS = """
because weil present past perfect future
although obwohl present past perfect future
when wenn present
while während present past
"""

FURTHER_SUBORDINATORS = """
if wenn present
when als past
until bis past
before bevor past present
"""

# English, its "to", German infinitive, 3rd person, plural, whether "not" may follow ("must not" would be "darf nicht").
QUICKSTART_MODALS = """
can - können kann können negatable
must - müssen muss müssen -
want to wollen will wollen negatable
should - sollen sollte sollten negatable
may - dürfen darf dürfen negatable
"""

# English singular and plural, German stem, how it declines, what follows it, whether it makes the noun definite.
# `-` is a number that it lacks. `*` is no word at all (dogs).
QUICKSTART_DETERMINERS = """
the the d der weak definite
a - ein ein mixed indefinite
- * - none strong indefinite
"""

FURTHER_DETERMINERS = """
this these dies der weak definite
every - jed der weak definite
no no kein ein mixed negative
my my mein ein mixed definite
our our unser ein mixed definite
- many viel der strong indefinite
- some einig der strong indefinite
- all all der weak definite
"""
