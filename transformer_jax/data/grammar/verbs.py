"""The verbs, one a line: English base, past, participle | German infinitive, 3rd person, past, auxiliary, participle |
subject classes > object classes.

English: `+up` is a particle, which follows a pronoun (picks it up), `=for` a preposition, which never does. German: a
hyphen in the infinitive marks the separable prefix. `> dative: ...` is an object in the dative, `> ... + ...` a
recipient in the dative and a thing in the accusative. Classes are those of the nouns or groups of them.
"""

QUICKSTART_VERBS = """
see saw seen | sehen sieht sah hat gesehen | animate > concrete place
hear heard heard | hören hört hörte hat gehört | animate > animate
find found found | finden findet fand hat gefunden | animate > concrete
look looked looked =for | suchen sucht suchte hat gesucht | animate > concrete
love loved loved | lieben liebt liebte hat geliebt | animate > animate
bite bit bitten | beißen beißt biss hat gebissen | animate > animate
chase chased chased | jagen jagt jagte hat gejagt | animate > animate
know knew known | kennen kennt kannte hat gekannt | person > person
visit visited visited | besuchen besucht besuchte hat besucht | person > person
greet greeted greeted | begrüßen begrüßt begrüßte hat begrüßt | person > person
help helped helped | helfen hilft half hat geholfen | person > dative: animate
follow followed followed | folgen folgt folgte ist gefolgt | animate > dative: animate
thank thanked thanked | danken dankt dankte hat gedankt | person > dative: person
buy bought bought | kaufen kauft kaufte hat gekauft | person > animal thing
wash washed washed | waschen wäscht wusch hat gewaschen | person > item clothing animal vehicle
draw drew drawn | zeichnen zeichnet zeichnete hat gezeichnet | person > concrete place
forget forgot forgotten | vergessen vergisst vergaß hat vergessen | person > portable
need needed needed | brauchen braucht brauchte hat gebraucht | person > thing
hide hid hidden | verstecken versteckt versteckte hat versteckt | animate > portable
feed fed fed | füttern füttert fütterte hat gefüttert | person > animal
read read read | lesen liest las hat gelesen | person > text
carry carried carried | tragen trägt trug hat getragen | person > portable furniture
sleep slept slept | schlafen schläft schlief hat geschlafen | animate
laugh laughed laughed | lachen lacht lachte hat gelacht | person
wait waited waited | warten wartet wartete hat gewartet | animate
sing sang sung | singen singt sang hat gesungen | person
dance danced danced | tanzen tanzt tanzte hat getanzt | person
give gave given | geben gibt gab hat gegeben | person > person + portable animal
show showed shown | zeigen zeigt zeigte hat gezeigt | person > person + concrete
bring brought brought | bringen bringt brachte hat gebracht | person > person + portable
send sent sent | schicken schickt schickte hat geschickt | person > person + text item clothing
call called called | an-rufen ruft rief hat angerufen | person > person
invite invited invited | ein-laden lädt lud hat eingeladen | person > person
pick picked picked +up | ab-holen holt holte hat abgeholt | person > person
pack packed packed | ein-packen packt packte hat eingepackt | person > portable
open opened opened | auf-machen macht machte hat aufgemacht | person > container
throw threw thrown +away | weg-werfen wirft warf hat weggeworfen | person > portable
look looked looked =at | an-sehen sieht sah hat angesehen | animate > concrete
bring brought brought +along | mit-bringen bringt brachte hat mitgebracht | person > portable animal
arrive arrived arrived | an-kommen kommt kam ist angekommen | person
wake woke woken +up | auf-wachen wacht wachte ist aufgewacht | animate
"""

FURTHER_VERBS = """
kiss kissed kissed | küssen küsst küsste hat geküsst | person > person
praise praised praised | loben lobt lobte hat gelobt | person > animate
warn warned warned | warnen warnt warnte hat gewarnt | person > person
hate hated hated | hassen hasst hasste hat gehasst | animate > animate
admire admired admired | bewundern bewundert bewunderte hat bewundert | person > concrete place
observe observed observed | beobachten beobachtet beobachtete hat beobachtet | animate > animate
protect protected protected | beschützen beschützt beschützte hat beschützt | animate > animate
disturb disturbed disturbed | stören stört störte hat gestört | animate > animate
free freed freed | befreien befreit befreite hat befreit | person > animate
catch caught caught | fangen fängt fing hat gefangen | animate > animal
hit hit hit | schlagen schlägt schlug hat geschlagen | person > person
save saved saved | retten rettet rettete hat gerettet | person > animate
serve served served | bedienen bedient bediente hat bedient | person > person
paint painted painted | malen malt malte hat gemalt | person > concrete place
describe described described | beschreiben beschreibt beschrieb hat beschrieben | person > concrete place
write wrote written | schreiben schreibt schrieb hat geschrieben | person > text
translate translated translated | übersetzen übersetzt übersetzte hat übersetzt | person > text
burn burned burned | verbrennen verbrennt verbrannte hat verbrannt | person > text clothing
sell sold sold | verkaufen verkauft verkaufte hat verkauft | person > animal thing
steal stole stolen | stehlen stiehlt stahl hat gestohlen | person > portable animal
lose lost lost | verlieren verliert verlor hat verloren | person > portable
repair repaired repaired | reparieren repariert reparierte hat repariert | person > device furniture vehicle
break broke broken | zerbrechen zerbricht zerbrach hat zerbrochen | person > item
fill filled filled | füllen füllt füllte hat gefüllt | person > container
sew sewed sewn | nähen näht nähte hat genäht | person > clothing
wear wore worn | tragen trägt trug hat getragen | person > clothing
cook cooked cooked | kochen kocht kochte hat gekocht | person > food
eat ate eaten | essen isst aß hat gegessen | person > food
eat ate eaten | fressen frisst fraß hat gefressen | animal > food
cut cut cut | schneiden schneidet schnitt hat geschnitten | person > food
taste tasted tasted | probieren probiert probierte hat probiert | person > food
drive drove driven | fahren fährt fuhr hat gefahren | person > vehicle
push pushed pushed | schieben schiebt schob hat geschoben | person > vehicle furniture
pull pulled pulled | ziehen zieht zog hat gezogen | animate > vehicle
enter entered entered | betreten betritt betrat hat betreten | animate > place
leave left left | verlassen verlässt verließ hat verlassen | animate > place
answer answered answered | antworten antwortet antwortete hat geantwortet | person > dative: person
trust trusted trusted | vertrauen vertraut vertraute hat vertraut | person > dative: animate
congratulate congratulated congratulated | gratulieren gratuliert gratulierte hat gratuliert | person > dative: person
obey obeyed obeyed | gehorchen gehorcht gehorchte hat gehorcht | animate > dative: person
lend lent lent | leihen leiht lieh hat geliehen | person > person + item text clothing vehicle
promise promised promised | versprechen verspricht versprach hat versprochen | person > person + portable animal
offer offered offered | an-bieten bietet bot hat angeboten | person > person + portable vehicle
give gave given +back | zurück-geben gibt gab hat zurückgegeben | person > portable
close closed closed | zu-machen macht machte hat zugemacht | person > container
put put put +on | an-ziehen zieht zog hat angezogen | person > garment
take took taken +off | aus-ziehen zieht zog hat ausgezogen | person > garment
try tried tried +on | an-probieren probiert probierte hat anprobiert | person > clothing
turn turned turned +on | ein-schalten schaltet schaltete hat eingeschaltet | person > device
turn turned turned +off | aus-schalten schaltet schaltete hat ausgeschaltet | person > device
take took taken +along | mit-nehmen nimmt nahm hat mitgenommen | person > portable animal
unpack unpacked unpacked | aus-packen packt packte hat ausgepackt | person > container
laugh laughed laughed =at | aus-lachen lacht lachte hat ausgelacht | person > person
introduce introduced introduced | vor-stellen stellt stellte hat vorgestellt | person > person
imitate imitated imitated | nach-ahmen ahmt ahmte hat nachgeahmt | person > animate
listen listened listened =to | zu-hören hört hörte hat zugehört | person > dative: person
watch watched watched | zu-sehen sieht sah hat zugesehen | animate > dative: animate
swim swam swum | schwimmen schwimmt schwamm ist geschwommen | animate
run ran run | laufen läuft lief ist gelaufen | animate
cry cried cried | weinen weint weinte hat geweint | person
work worked worked | arbeiten arbeitet arbeitete hat gearbeitet | person
play played played | spielen spielt spielte hat gespielt | animate
smile smiled smiled | lächeln lächelt lächelte hat gelächelt | person
pray prayed prayed | beten betet betete hat gebetet | person
suffer suffered suffered | leiden leidet litt hat gelitten | animate
die died died | sterben stirbt starb ist gestorben | animate
fall fell fallen +asleep | ein-schlafen schläft schlief ist eingeschlafen | animate
get got got +up | auf-stehen steht stand ist aufgestanden | person
depart departed departed | ab-reisen reist reiste ist abgereist | person
come came come +back | zurück-kommen kommt kam ist zurückgekommen | animate
"""

# Done on purpose, so that "in order to" may follow.
PURPOSEFUL_VERBS = ('work', 'wait', 'sing', 'dance', 'pray', 'run', 'get up', 'come back', 'depart')

# States and what befalls one: not tried, decided, allowed or done on a date.
STATIVE_VERBS = ('hear', 'love', 'hate', 'know', 'need', 'forget', 'lose', 'admire')

# Verbs whose object is a whole clause: "knows that ..." / "weiß, dass ...". The subject is a person.
REPORTING_VERBS = """
say said said | sagen sagt sagte hat gesagt | person
think thought thought | denken denkt dachte hat gedacht | person
believe believed believed | glauben glaubt glaubte hat geglaubt | person
hope hoped hoped | hoffen hofft hoffte hat gehofft | person
notice noticed noticed | bemerken bemerkt bemerkte hat bemerkt | person
"""

# Verbs followed by an infinitive: "tries to see the dog" / "versucht, den Hund zu sehen".
CONTROL_VERBS = """
try tried tried | versuchen versucht versuchte hat versucht | person
hope hoped hoped | hoffen hofft hoffte hat gehofft | person
promise promised promised | versprechen verspricht versprach hat versprochen | person
decide decided decided | beschließen beschließt beschloss hat beschlossen | person
"""
