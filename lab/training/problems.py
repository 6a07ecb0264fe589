"""Word problems with worked answers in the eleven languages of the maths prompts, written for this project.

Ten situations; in each language the same ten, with its own names and things. Counts are drawn from numbers that take
the same plural in every language here (Russian: 5 to 20, 25 to 30, ...), so that a sentence is right for any draw.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

COUNTS = [n for n in range(5, 96) if n < 21 or n % 10 in (0, 5, 6, 7, 8, 9)]


class Problem(NamedTuple):
    """A question, and its answer worked out in one line of arithmetic per step."""

    language: str
    question: str
    answer: str


class Phrases(NamedTuple):
    """Phrases of a language: {x} and {y} are names, {i} a thing, {a}, {b}, {c} counts."""

    names: str
    things: str
    answer: str
    situations: tuple[str, ...]


PHRASES = {
    "en": Phrases(
        "Anna Ben Carla David Emma Frank Grace Henry Ivy Jack Laura Tom",
        "apples,pencils,stickers,cookies,marbles,tickets,books,flowers,eggs,cards",
        "The answer is {r}.",
        (
            "{x} has {a} {i}. A friend brings {b} more {i}, and {x} then gives {c} of them away. "
            "How many {i} does {x} have left?",
            "A shop sells {i} at ${a} each. {x} buys {b} {i} and pays with ${c}. How much change does {x} get?",
            "There are {a} boxes with {b} {i} in each box. {x} takes out {c} {i}. "
            "How many {i} are left in the boxes altogether?",
            "{x} works {a} hours a day and earns ${b} an hour. How many dollars does {x} earn in {c} days?",
            "{x} had {a} {i} and kept {b} of them. The rest were shared equally among {c} friends. "
            "How many {i} did each friend receive?",
            "The road between two towns is {a} kilometers long. {x} drives at {b} kilometers per hour for {c} hours. "
            "How many kilometers remain?",
            "{x} is reading a book of {a} pages. Every day {x} reads {b} pages. "
            "How many pages are left after {c} days?",
            "{x} collected {a} {i}. {y} collected {b} times as many. How many {i} did they collect together?",
            "{x} saves ${a} every week. After {b} weeks {x} spends ${c}. How much money is left?",
            "{x} is {a} years old. {y} is {b} years older than {x}. How old will {y} be in {c} years?",
        ),
    ),
    "es": Phrases(
        "Ana Bruno Carmen Diego Elena Felipe Isabel Javier Lucía Mateo Rosa Tomás",
        "libros,lápices,globos,boletos,huevos,dulces,juguetes,cuadernos,panes,sellos",
        "La respuesta es {r}.",
        (
            "{x} tiene {a} {i}. Un amigo trae {b} {i} más y después {x} regala {c}. ¿Cuántos {i} le quedan a {x}?",
            "En una tienda venden {i} a ${a} cada uno. {x} compra {b} {i} y paga con ${c}. ¿Cuánto cambio recibe {x}?",
            "Hay {a} cajas y en cada una hay {b} {i}. {x} saca {c} {i}. ¿Cuántos {i} quedan en total en las cajas?",
            "{x} trabaja {a} horas al día y gana ${b} por hora. ¿Cuántos dólares gana {x} en {c} días?",
            "{x} tenía {a} {i} y se quedó con {b}. El resto se repartió por igual entre {c} amigos. "
            "¿Cuántos {i} recibió cada amigo?",
            "La carretera entre dos pueblos mide {a} kilómetros. {x} conduce a {b} kilómetros por hora durante "
            "{c} horas. ¿Cuántos kilómetros le faltan?",
            "{x} lee un libro de {a} páginas. Cada día lee {b} páginas. ¿Cuántas páginas le quedan después de "
            "{c} días?",
            "{x} juntó {a} {i}. {y} juntó {b} veces esa cantidad. ¿Cuántos {i} juntaron entre los dos?",
            "{x} ahorra ${a} cada semana. Después de {b} semanas gasta ${c}. ¿Cuánto dinero le queda?",
            "{x} tiene {a} años. {y} tiene {b} años más que {x}. ¿Cuántos años tendrá {y} dentro de {c} años?",
        ),
    ),
    "fr": Phrases(
        "Alice Bruno Claire David Émile Fanny Gérard Hélène Louis Marie Paul Sophie",
        "livres,crayons,ballons,billets,biscuits,bonbons,jouets,cahiers,gâteaux,timbres",
        "La réponse est {r}.",
        (
            "{x} a {a} {i}. Un ami apporte {b} {i} de plus, puis {x} en donne {c}. Combien de {i} reste-t-il à {x} ?",
            "Un magasin vend des {i} à {a} $ pièce. {x} achète {b} {i} et paie avec {c} $. "
            "Combien de monnaie reçoit {x} en retour ?",
            "Il y a {a} boîtes et chacune contient {b} {i}. {x} en retire {c}. "
            "Combien de {i} reste-t-il en tout dans les boîtes ?",
            "{x} travaille {a} heures par jour et gagne {b} $ de l'heure. Combien de dollars {x} gagne en {c} jours ?",
            "{x} avait {a} {i} et en a gardé {b}. Le reste a été partagé également entre {c} amis. "
            "Combien de {i} chaque ami a-t-il reçus ?",
            "La route entre deux villes fait {a} kilomètres. {x} roule à {b} kilomètres par heure pendant {c} heures. "
            "Combien de kilomètres reste-t-il ?",
            "{x} lit un livre de {a} pages, à raison de {b} pages par jour. "
            "Combien de pages reste-t-il après {c} jours ?",
            "{x} a ramassé {a} {i}. {y} en a ramassé {b} fois plus. Combien de {i} ont-ils ramassés ensemble ?",
            "{x} économise {a} $ chaque semaine. Après {b} semaines, {x} dépense {c} $. Combien d'argent reste-t-il ?",
            "{x} a {a} ans. {y} a {b} ans de plus que {x}. Quel âge aura {y} dans {c} ans ?",
        ),
    ),
    "de": Phrases(
        "Anna Bernd Clara Dieter Eva Felix Greta Hans Ida Jonas Lena Paul",
        "Äpfel,Stifte,Karten,Bücher,Kekse,Murmeln,Eier,Blumen,Hefte,Briefmarken",
        "Die Antwort ist {r}.",
        (
            "{x} hat {a} {i}. Eine Freundin bringt {b} {i} dazu, danach verschenkt {x} {c} davon. "
            "Wie viele {i} hat {x} noch?",
            "Ein Laden verkauft {i} für je {a} $. {x} kauft {b} {i} und bezahlt mit {c} $. "
            "Wie viel Wechselgeld bekommt {x}?",
            "Es gibt {a} Kisten mit je {b} {i}. {x} nimmt {c} {i} heraus. "
            "Wie viele {i} sind insgesamt noch in den Kisten?",
            "{x} arbeitet {a} Stunden am Tag und verdient {b} $ pro Stunde. "
            "Wie viele Dollar verdient {x} in {c} Tagen?",
            "{x} hatte {a} {i} und behielt {b} davon. Der Rest wurde gleichmäßig unter {c} Freunden aufgeteilt. "
            "Wie viele {i} bekam jeder Freund?",
            "Die Straße zwischen zwei Städten ist {a} Kilometer lang. {x} fährt {c} Stunden lang mit {b} Kilometern "
            "pro Stunde. Wie viele Kilometer bleiben noch?",
            "{x} liest ein Buch mit {a} Seiten und schafft jeden Tag {b} Seiten. "
            "Wie viele Seiten sind nach {c} Tagen noch übrig?",
            "{x} hat {a} {i} gesammelt. {y} hat {b}-mal so viele gesammelt. "
            "Wie viele {i} haben sie zusammen gesammelt?",
            "{x} spart jede Woche {a} $. Nach {b} Wochen gibt {x} {c} $ aus. Wie viel Geld ist übrig?",
            "{x} ist {a} Jahre alt. {y} ist {b} Jahre älter als {x}. Wie alt ist {y} in {c} Jahren?",
        ),
    ),
    "ru": Phrases(
        "Анна Борис Вера Дмитрий Елена Иван Катя Мария Николай Ольга Павел Саша",
        "яблок,карандашей,книг,билетов,конфет,марок,тетрадей,цветов,шаров,открыток",
        "Ответ: {r}.",
        (
            "У {x_gen} есть {a} {i}. Друг принёс ещё {b} {i}, после чего {c} {i} отдали соседям. Сколько {i} осталось?",
            "В магазине одна вещь стоит {a} долларов. Покупатель взял {b} таких вещей и дал продавцу {c} долларов. "
            "Сколько сдачи он получит?",
            "На складе стоит {a} коробок, в каждой лежит {b} {i}. Из коробок достали {c} {i}. "
            "Сколько {i} осталось в коробках?",
            "{x} работает {a} часов в день и получает {b} долларов за час. "
            "Сколько долларов можно заработать за {c} дней?",
            "На столе лежало {a} {i}. Из них {b} {i} оставили себе, а остальные поровну раздали {c} друзьям. "
            "Сколько {i} получил каждый друг?",
            "Дорога между двумя городами имеет длину {a} километров. {x} едет {c} часов со скоростью {b} километров "
            "в час. Сколько километров осталось проехать?",
            "{x} читает книгу, в которой {a} страниц. Каждый день удаётся прочитать {b} страниц. "
            "Сколько страниц останется через {c} дней?",
            "{x} и {y} собирают коллекцию. У первого коллекционера {a} {i}, у второго в {b} раз больше. "
            "Сколько {i} у них вместе?",
            "{x} откладывает {a} долларов каждую неделю. Через {b} недель потрачено {c} долларов. "
            "Сколько денег осталось?",
            "{x_dat} сейчас {a} лет. {y} старше на {b} лет. Сколько лет будет старшему через {c} лет?",
        ),
    ),
    "zh": Phrases(
        "小明 小红 李华 王芳 张伟 刘洋 陈静 赵强 孙丽 周杰 吴敏 小刚",
        "苹果,鸡蛋,气球,面包,橘子,玩具,盒子,桃子,杯子,球",
        "答案是{r}。",
        (
            "{x}有{a}个{i}。朋友又带来{b}个{i}，然后{x}送出了{c}个。{x}还剩多少个{i}？",
            "商店里每个{i}卖{a}元。{x}买了{b}个{i}，付了{c}元。应该找回多少元？",
            "有{a}个箱子，每个箱子里有{b}个{i}。{x}拿走了{c}个{i}。箱子里一共还剩多少个{i}？",
            "{x}每天工作{a}小时，每小时挣{b}元。{x}工作{c}天一共能挣多少元？",
            "{x}有{a}个{i}，自己留下{b}个，其余的平均分给{c}个朋友。每个朋友得到多少个{i}？",
            "两座城市之间的公路长{a}公里。{x}以每小时{b}公里的速度开了{c}小时。还剩多少公里？",
            "{x}在读一本{a}页的书，每天读{b}页。{c}天后还剩多少页没有读？",
            "{x}收集了{a}个{i}，{y}收集的数量是{x}的{b}倍。他们一共收集了多少个{i}？",
            "{x}每周存{a}元。{b}周以后，{x}花掉了{c}元。还剩多少钱？",
            "{x}今年{a}岁，{y}比{x}大{b}岁。{c}年后{y}多少岁？",
        ),
    ),
    "ja": Phrases(
        "太郎 花子 健太 美咲 翔太 由美 大輔 さくら 直樹 真由 一郎 恵子",
        "りんご,みかん,卵,風船,パン,ボール,おもちゃ,クッキー,箱,飴",
        "答えは{r}です。",
        (
            "{x}さんは{i}を{a}個持っています。友だちがさらに{b}個の{i}を持ってきました。その後、{x}さんは{c}個を"
            "あげました。{i}は何個残っていますか？",
            "お店では{i}を1個{a}ドルで売っています。{x}さんは{i}を{b}個買い、{c}ドルを払いました。おつりはいくらですか？",
            "箱が{a}個あり、それぞれに{i}が{b}個入っています。{x}さんは{i}を{c}個取り出しました。"
            "箱に残っている{i}は全部で何個ですか？",
            "{x}さんは1日に{a}時間働き、1時間につき{b}ドルを稼ぎます。{c}日間で何ドル稼ぎますか？",
            "{x}さんは{i}を{a}個持っていて、{b}個を自分用に残しました。残りを{c}人の友だちで同じ数ずつ分けました。"
            "友だち1人は{i}を何個もらいましたか？",
            "2つの町の間の道は{a}キロメートルです。{x}さんは時速{b}キロメートルで{c}時間運転しました。"
            "残りは何キロメートルですか？",
            "{x}さんは{a}ページの本を読んでいます。毎日{b}ページずつ読みます。{c}日後には何ページ残っていますか？",
            "{x}さんは{i}を{a}個集めました。{y}さんはその{b}倍を集めました。2人合わせて{i}を何個集めましたか？",
            "{x}さんは毎週{a}ドルを貯金します。{b}週間後に{c}ドルを使いました。お金はいくら残っていますか？",
            "{x}さんは{a}歳です。{y}さんは{x}さんより{b}歳年上です。{c}年後、{y}さんは何歳になりますか？",
        ),
    ),
    "th": Phrases(
        "สมชาย มาลี วิชัย สุดา ประยุทธ์ นิดา อนันต์ พิมพ์ ชาติ กานดา ธนา อรุณี",
        "แอปเปิล,ส้ม,ไข่,ลูกโป่ง,ขนมปัง,ลูกบอล,ของเล่น,คุกกี้,กล่อง,ลูกอม",
        "คำตอบคือ {r}",
        (
            "{x}มี{i} {a} ชิ้น เพื่อนนำ{i}มาให้อีก {b} ชิ้น จากนั้น{x}แจกไป {c} ชิ้น {x}เหลือ{i}กี่ชิ้น",
            "ร้านค้าขาย{i}ชิ้นละ {a} ดอลลาร์ {x}ซื้อ{i} {b} ชิ้นและจ่ายเงิน {c} ดอลลาร์ {x}จะได้เงินทอนเท่าไร",
            "มีลังอยู่ {a} ลัง แต่ละลังมี{i} {b} ชิ้น {x}หยิบออกไป {c} ชิ้น ในลังทั้งหมดเหลือ{i}กี่ชิ้น",
            "{x}ทำงานวันละ {a} ชั่วโมงและได้เงินชั่วโมงละ {b} ดอลลาร์ ใน {c} วัน{x}ได้เงินกี่ดอลลาร์",
            "{x}มี{i} {a} ชิ้นและเก็บไว้เอง {b} ชิ้น ที่เหลือแบ่งให้เพื่อน {c} คนเท่า ๆ กัน เพื่อนแต่ละคนได้{i}กี่ชิ้น",
            "ถนนระหว่างสองเมืองยาว {a} กิโลเมตร {x}ขับรถด้วยความเร็ว {b} กิโลเมตรต่อชั่วโมงเป็นเวลา {c} ชั่วโมง "
            "เหลือระยะทางอีกกี่กิโลเมตร",
            "{x}อ่านหนังสือที่มี {a} หน้า ทุกวันอ่านได้ {b} หน้า หลังจาก {c} วันจะเหลือกี่หน้า",
            "{x}เก็บ{i}ได้ {a} ชิ้น {y}เก็บได้เป็น {b} เท่า ทั้งสองคนเก็บ{i}ได้รวมกันกี่ชิ้น",
            "{x}ออมเงินสัปดาห์ละ {a} ดอลลาร์ หลังจาก {b} สัปดาห์ใช้เงินไป {c} ดอลลาร์ เหลือเงินเท่าไร",
            "{x}อายุ {a} ปี {y}อายุมากกว่า{x} {b} ปี อีก {c} ปี{y}จะอายุเท่าไร",
        ),
    ),
    "sw": Phrases(
        "Asha Baraka Juma Neema Hamisi Zawadi Rehema Daudi Amina Musa Fatuma Salim",
        "vitabu,viatu,vikombe,viti,viazi,visu,vikapu,vyungu",
        "Jibu ni {r}.",
        (
            "{x} ana {i} {a}. Rafiki analeta {i} vingine {b}, kisha {x} anatoa {c}. {x} amebaki na {i} vingapi?",
            "Duka linauza {i} kwa ${a} kila kimoja. {x} ananunua {i} {b} na kulipa ${c}. "
            "{x} atarudishiwa pesa kiasi gani?",
            "Kuna masanduku {a} na kila sanduku lina {i} {b}. {x} anachukua {i} {c}. "
            "Ni {i} vingapi vimebaki katika masanduku yote?",
            "{x} anafanya kazi saa {a} kwa siku na anapata ${b} kwa saa. {x} atapata dola ngapi kwa siku {c}?",
            "{x} alikuwa na {i} {a} na akabaki na {b}. Vilivyobaki viligawanywa sawa kwa marafiki {c}. "
            "Kila rafiki alipata {i} vingapi?",
            "Barabara kati ya miji miwili ina urefu wa kilomita {a}. {x} anaendesha kwa kilomita {b} kwa saa kwa muda "
            "wa saa {c}. Zimebaki kilomita ngapi?",
            "{x} anasoma kitabu chenye kurasa {a}. Kila siku anasoma kurasa {b}. "
            "Baada ya siku {c} zitabaki kurasa ngapi?",
            "{x} alikusanya {i} {a}. {y} alikusanya mara {b} zaidi. Wote pamoja walikusanya {i} vingapi?",
            "{x} huweka akiba ya ${a} kila wiki. Baada ya wiki {b} anatumia ${c}. Amebaki na pesa kiasi gani?",
            "{x} ana umri wa miaka {a}. {y} ni mkubwa kuliko {x} kwa miaka {b}. "
            "Baada ya miaka {c}, {y} atakuwa na umri gani?",
        ),
    ),
    "bn": Phrases(
        "রহিম করিম সুমি মিতা রাজু অনিতা কামাল নীলা সজল রিনা তপন মালা",
        "আপেল,কমলা,ডিম,বেলুন,বই,কলম,খেলনা,বিস্কুট,ফুল,কার্ড",
        "উত্তর হল {r}।",
        (
            "{x} এর কাছে {a}টি {i} আছে। এক বন্ধু আরও {b}টি {i} আনল, তারপর {x} {c}টি দিয়ে দিল। "
            "{x} এর কাছে কতগুলি {i} বাকি আছে?",
            "একটি দোকানে প্রতিটি {i} {a} ডলারে বিক্রি হয়। {x} {b}টি {i} কিনে {c} ডলার দিল। {x} কত টাকা ফেরত পাবে?",
            "{a}টি বাক্স আছে এবং প্রতিটি বাক্সে {b}টি {i} আছে। {x} {c}টি {i} বের করে নিল। বাক্সগুলিতে মোট কতগুলি {i} বাকি আছে?",
            "{x} দিনে {a} ঘণ্টা কাজ করে এবং ঘণ্টায় {b} ডলার আয় করে। {c} দিনে {x} কত ডলার আয় করবে?",
            "{x} এর কাছে {a}টি {i} ছিল এবং সে {b}টি নিজের জন্য রাখল। বাকিগুলি {c} জন বন্ধুর মধ্যে সমানভাবে ভাগ করা হল। "
            "প্রত্যেক বন্ধু কতগুলি {i} পেল?",
            "দুটি শহরের মধ্যে রাস্তাটি {a} কিলোমিটার দীর্ঘ। {x} ঘণ্টায় {b} কিলোমিটার বেগে {c} ঘণ্টা গাড়ি চালাল। "
            "আর কত কিলোমিটার বাকি আছে?",
            "{x} একটি {a} পৃষ্ঠার বই পড়ছে। প্রতিদিন সে {b} পৃষ্ঠা পড়ে। {c} দিন পরে কত পৃষ্ঠা বাকি থাকবে?",
            "{x} {a}টি {i} সংগ্রহ করেছে। {y} তার {b} গুণ সংগ্রহ করেছে। তারা একসাথে কতগুলি {i} সংগ্রহ করেছে?",
            "{x} প্রতি সপ্তাহে {a} ডলার জমায়। {b} সপ্তাহ পরে সে {c} ডলার খরচ করে। কত টাকা বাকি আছে?",
            "{x} এর বয়স {a} বছর। {y} {x} এর চেয়ে {b} বছরের বড়। {c} বছর পরে {y} এর বয়স কত হবে?",
        ),
    ),
    "te": Phrases(
        "రవి సీత రాము లక్ష్మి కిరణ్ అనిత సురేష్ పద్మ గోపాల్ కవిత మోహన్ రాధ",
        "ఆపిల్స్,పెన్నులు,పుస్తకాలు,బంతులు,గుడ్లు,పువ్వులు,బొమ్మలు,కార్డులు,నాణేలు,బిస్కెట్లు",
        "సమాధానం {r}.",
        (
            "{x} వద్ద {a} {i} ఉన్నాయి. ఒక స్నేహితుడు మరో {b} {i} తెచ్చాడు, తరువాత {x} {c} ఇచ్చేశారు. {x} వద్ద ఇంకా ఎన్ని {i} ఉన్నాయి?",
            "ఒక దుకాణంలో {i} ఒక్కొక్కటి ${a}కు అమ్ముతారు. {x} {b} {i} కొని ${c} చెల్లించారు. {x}కు ఎంత చిల్లర తిరిగి వస్తుంది?",
            "{a} పెట్టెలు ఉన్నాయి, ప్రతి పెట్టెలో {b} {i} ఉన్నాయి. {x} {c} {i} తీసుకున్నారు. పెట్టెల్లో మొత్తం ఎన్ని {i} మిగిలి ఉన్నాయి?",
            "{x} రోజుకు {a} గంటలు పనిచేసి గంటకు ${b} సంపాదిస్తారు. {c} రోజుల్లో {x} ఎన్ని డాలర్లు సంపాదిస్తారు?",
            "{x} వద్ద {a} {i} ఉన్నాయి, వాటిలో {b} తన దగ్గర ఉంచుకున్నారు. మిగిలినవి {c} స్నేహితులకు సమానంగా పంచారు. "
            "ప్రతి స్నేహితుడికి ఎన్ని {i} వచ్చాయి?",
            "రెండు పట్టణాల మధ్య రహదారి {a} కిలోమీటర్లు ఉంటుంది. {x} గంటకు {b} కిలోమీటర్ల వేగంతో {c} గంటలు నడిపారు. "
            "ఇంకా ఎన్ని కిలోమీటర్లు మిగిలి ఉన్నాయి?",
            "{x} {a} పేజీల పుస్తకం చదువుతున్నారు. ప్రతి రోజు {b} పేజీలు చదువుతారు. {c} రోజుల తరువాత ఎన్ని పేజీలు మిగులుతాయి?",
            "{x} {a} {i} సేకరించారు. {y} దానికి {b} రెట్లు సేకరించారు. ఇద్దరూ కలిసి ఎన్ని {i} సేకరించారు?",
            "{x} ప్రతి వారం ${a} పొదుపు చేస్తారు. {b} వారాల తరువాత ${c} ఖర్చు చేస్తారు. ఎంత డబ్బు మిగిలి ఉంది?",
            "{x} వయస్సు {a} సంవత్సరాలు. {y} {x} కంటే {b} సంవత్సరాలు పెద్ద. {c} సంవత్సరాల తరువాత {y} వయస్సు ఎంత?",
        ),
    ),
}

# The names of a language whose names decline: genitive and dative, in the order of its names.
_DECLINED = {
    "ru": (
        "Анны Бориса Веры Дмитрия Елены Ивана Кати Марии Николая Ольги Павла Саши",
        "Анне Борису Вере Дмитрию Елене Ивану Кате Марии Николаю Ольге Павлу Саше",
    )
}


def _numbers(situation: int, rng: np.random.Generator) -> tuple[int, int, int, list[str], int]:
    """Counts that make the situation possible, its arithmetic and its result."""

    def pick(low: int = 5, high: int = 95) -> int:
        return int(rng.choice([n for n in COUNTS if low <= n <= high]))

    a, b, c = pick(), pick(5, 50), pick(5, 20)
    if situation == 0:
        a = pick(c, 95)
        return a, b, c, [f"{a} + {b} = {a + b}", f"{a + b} - {c} = {a + b - c}"], a + b - c
    if situation == 1:
        a, b = pick(5, 20), pick(5, 20)
        c = (a * b // 50 + 1) * 50
        return a, b, c, [f"{a} x {b} = {a * b}", f"{c} - {a * b} = {c - a * b}"], c - a * b
    if situation == 2:
        a, b = pick(5, 30), pick(5, 30)
        return a, b, c, [f"{a} x {b} = {a * b}", f"{a * b} - {c} = {a * b - c}"], a * b - c
    if situation == 3:
        a = pick(5, 10)
        return a, b, c, [f"{a} x {b} = {a * b}", f"{a * b} x {c} = {a * b * c}"], a * b * c
    if situation == 4:
        share = int(rng.integers(2, 10))
        c = pick(5, 10)
        options = [n for n in COUNTS if n + share * c in COUNTS]
        if not options:
            return _numbers(situation, rng)
        b = int(rng.choice(options))
        a = b + share * c
        return a, b, c, [f"{a} - {b} = {a - b}", f"{a - b} / {c} = {share}"], share
    if situation in (5, 6):
        b, c = pick(20, 95), pick(5, 10)
        a = b * c + 5 * int(rng.integers(2, 60))
        a += (5 - a) % 5
        return a, b, c, [f"{b} x {c} = {b * c}", f"{a} - {b * c} = {a - b * c}"], a - b * c
    if situation == 7:
        b = pick(5, 10)
        return a, b, c, [f"{a} x {b} = {a * b}", f"{a} + {a * b} = {a + a * b}"], a + a * b
    if situation == 8:
        a = pick(10, 95)
        return a, b, c, [f"{a} x {b} = {a * b}", f"{a * b} - {c} = {a * b - c}"], a * b - c
    a, b = pick(5, 40), pick(5, 20)
    return a, b, c, [f"{a} + {b} = {a + b}", f"{a + b} + {c} = {a + b + c}"], a + b + c


def problems(language: str, count: int, rng: np.random.Generator) -> Iterator[Problem]:
    """count problems in a language; the same generator state gives the same problems."""
    phrases = PHRASES[language]
    names, things = phrases.names.split(), phrases.things.split(",")
    genitive, dative = (case.split() for case in _DECLINED.get(language, (phrases.names, phrases.names)))
    for _ in range(count):
        situation = int(rng.integers(len(phrases.situations)))
        a, b, c, steps, result = _numbers(situation, rng)
        x, y = (int(n) for n in rng.choice(len(names), 2, replace=False))
        words = {"x": names[x], "y": names[y], "x_gen": genitive[x], "x_dat": dative[x]}
        thing = things[int(rng.integers(len(things)))]
        question = phrases.situations[situation].format(i=thing, a=a, b=b, c=c, **words)
        closing = phrases.answer.format(r=result)
        yield Problem(language, question, ". ".join(steps) + ". " + closing)
