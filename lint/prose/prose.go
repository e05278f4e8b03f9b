// SPDX-License-Identifier: Apache-2.0

package main

import (
	"regexp"
	"slices"
	"strings"
)

// text is one run of prose: a comment group, a paragraph, a list item, a message.
type text struct {
	file string // relative to the root of the repository
	line int    // of its first line, from 1
	body string // without comment markers and markup
}

// figures counts a set of texts.
type figures struct {
	words    int
	relative int   // matches of relativePattern
	headless int   // clauses that begin with a relative pronoun and have no noun before it
	lengths  []int // words of each sentence, in no order
}

var (
	wordPattern     = regexp.MustCompile(`[\pL][\pL'’-]*`)
	relativePattern = regexp.MustCompile(`(?i)\b(?:that|which|who|what|whose|whom|whoever|whatever)\b`)

	// headlessPattern matches a relative pronoun in place of a noun. After a noun,
	// as in "the agent that sent it", the pronoun has its head and does not match.
	headlessPattern = regexp.MustCompile(`(?i)\b(?:what|whatever|whoever)\b` +
		`|(?:^|[.;:,(]\s*|\b(?:and|or|but|of|by|to|for|from|with|in|on|at|than|as|says?|tells?|knows?|sees?|asks?|shows?)\s+)who(?:se|m)?\b` +
		`|\bthose\s+(?:that|which|who|whose|of|with|in|on|at|from|not|without|to|for|by|behind|below|above|before|after|beside|inside|outside|already|still|only|found|known|closed|seen|sent|left|made|held|set|missing|waiting)\b` +
		`|\bthat\s+of\b` +
		`|\bones?\s+(?:that|which|who|whose)\b`)

	// endPattern is the end of a sentence inside a text. A full stop inside a
	// name ("eth0.100", "lb.listen") is not followed by a space, and "e.g. x" by
	// no capital.
	endPattern = regexp.MustCompile(`[.!?][)"'”’` + "`" + `]*\s+[\p{Lu}(["'“` + "`" + `*]`)
)

// add counts t.
func (f *figures) add(t text) {
	f.words += countWords(t.body)
	f.relative += len(relativePattern.FindAllString(t.body, -1))
	f.headless += len(headlessPattern.FindAllString(t.body, -1))
	for _, s := range sentences(t.body) {
		if n := countWords(s); n > 0 {
			f.lengths = append(f.lengths, n)
		}
	}
}

// relativePer100 is the number of relative words in 100 words.
func (f *figures) relativePer100() float64 { return ratio(100*f.relative, f.words) }

// headlessPer1000 is the number of headless clauses in 1,000 words.
func (f *figures) headlessPer1000() float64 { return ratio(1000*f.headless, f.words) }

// quantile is the length in words below which the fraction q of the sentences lies.
func (f *figures) quantile(q float64) int {
	if len(f.lengths) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(f.lengths))
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

func ratio(a, b int) float64 {
	if b == 0 {
		return 0
	}
	return float64(a) / float64(b)
}

func countWords(s string) int { return len(wordPattern.FindAllString(s, -1)) }

// sentences splits s at the ends of sentences.
func sentences(s string) []string {
	var out []string
	for {
		end := endPattern.FindStringIndex(s)
		if end == nil {
			break
		}
		// The match includes the first letter of the next sentence.
		cut := strings.IndexAny(s[end[0]:], " \t\n") + end[0]
		out = append(out, s[:cut])
		s = s[cut+1:]
	}
	return append(out, s)
}
