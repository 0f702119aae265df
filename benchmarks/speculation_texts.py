"""Prompts of speculation.py: tasks whose answers copy the prompt, and questions whose answers do not."""

from __future__ import annotations

COPY_TASKS = (
    "Repeat this text word for word, and correct its spelling where needed:",
    "Quote this text exactly, sentence by sentence, without adding anything:",
    "Edit this paragraph: keep every sentence as it is, and write it out in full:",
)

PASSAGES = (
    "The harbour opens at six in the morning, and the first boats leave before the light is good. Most of them "
    "carry nets and ice; two carry visitors who want to see the seals on the northern rocks. By noon the wind "
    "comes up from the west, and the small boats turn back. The last one ties up at four, when the auction hall "
    "begins to fill.",
    "A good knife needs little care, but it needs it often. Wash it by hand, dry it at once, and keep it where "
    "the edge touches nothing. Once a month, draw it over a fine stone at a low angle, ten times on each side. If"
    " the blade still slides off a ripe tomato, repeat this with a coarser stone and finish with the fine one.",
    "The library lends books for four weeks, films for one week, and maps for a day. Readers may renew a book "
    "twice, as long as nobody else has asked for it. Late returns cost ten cents a day, up to the price of the "
    "book. Lost cards are replaced at the front desk, where the staff will also show new members how the "
    "catalogue works.",
    "Our team met on Tuesday to review the new heating plan for the school. The old boiler will stay until "
    "spring, and the pipes on the second floor will be replaced during the winter break. Parents asked whether "
    "the gym can be used in January; the answer is yes, but only the eastern half. The next meeting is on the "
    "third of March.",
    "To plant a pear tree, dig a hole twice as wide as the roots and just as deep. Loosen the soil at the bottom,"
    " set the tree upright, and fill the hole with the earth that came out of it. Press it down with your foot, "
    "water it slowly, and cover the ground with straw. In its first summer the tree wants a full can of water "
    "every week.",
    "The train to Marlow leaves from platform two at twelve minutes past every hour. Change at the junction for "
    "the coast line, which runs until ten in the evening. Bicycles travel free in the last carriage, except on "
    "Friday afternoons. If the lift is out of order, please call the station office, and someone will help you "
    "with your luggage.",
    "Grandmother kept her recipes in a tin box with a painted lid. Each card had a name, a date, and a short "
    "remark about who had liked it. The card for plum cake was brown with butter, and the one for fish soup had "
    "never been used. When she moved to the city, she gave the box to my sister, who still cooks from it on "
    "Sundays.",
    "The survey reached four hundred households in nine villages. Most people said that the road matters more to "
    "them than the bridge, because the bridge is closed only in winter. Two villages would pay for a bus if it "
    "came twice a day. The report recommends that the council repairs the road first and asks again about the "
    "bridge in two years.",
)

QUESTIONS = (
    "Why do people enjoy music that makes them sad?",
    "Describe a street market on a rainy day.",
    "What should I think about before I buy a used bicycle?",
    "Tell me a short story about a lighthouse keeper and a lost letter.",
    "How would you explain gravity to a child of six?",
    "What makes a good teacher?",
    "Write a letter to a neighbour whose dog barks at night.",
    "How did people keep food fresh before there were refrigerators?",
    "Invent a festival for a small town in the mountains.",
    "What are the advantages of walking to work?",
    "Describe the taste of coffee to someone who has never had it.",
    "Why is it hard to learn a language as an adult?",
    "Tell me about a dream in which the sea has disappeared.",
    "How should a beginner start to draw?",
    "What could be the reasons for a plant's yellow leaves?",
    "Write the opening of a detective story that begins in a bakery.",
)
