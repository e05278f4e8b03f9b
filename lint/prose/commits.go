// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strings"
)

// since is the day on which docs/STYLE.md began to hold for commit subjects.
const since = "2026-11-27T19:00:00Z"

const maxSubject = 72 // characters

var (
	subjectPattern = regexp.MustCompile(`^[a-z0-9/_., {}*-]+: [a-z]`)
	// finitePattern matches a first word that is no imperative: adds, added, adding.
	finitePattern = regexp.MustCompile(`^(?:\w+(?:ed|ing)|\w*[^s\W]s)$`)
	// imperatives end like one of these forms, and are none.
	imperatives = []string{"bring", "embed", "exceed", "feed", "focus", "need", "proceed", "seed", "shed", "speed", "string"}
)

// landed are subjects on main that broke a rule unseen. The history stays, so they are no longer counted.
var landed = []string{"picture: plots with a title, units and both colour schemes"}

// commitSubjects returns the subjects of all commits after since, newest first.
// Merge commits are no changes of their own.
func commitSubjects(root string) ([]string, error) {
	cmd := exec.Command("git", "log", "--no-merges", "--since", since, "--format=%s")
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("read the history: %w", exitError(err))
	}
	return slices.DeleteFunc(strings.Split(string(out), "\n"), func(s string) bool { return s == "" }), nil
}

// subjectProblem names the broken rule, or "".
func subjectProblem(subject string) string {
	_, change, _ := strings.Cut(subject, ": ")
	first, _, _ := strings.Cut(change, " ")
	switch {
	case slices.Contains(landed, subject):
		return ""
	case len([]rune(subject)) > maxSubject:
		return fmt.Sprintf("longer than %d characters", maxSubject)
	case relativePattern.MatchString(subject):
		return "a relative clause: name the change"
	case !subjectPattern.MatchString(subject):
		return `not of the form "area: imperative subject"`
	case finitePattern.MatchString(first) && !slices.Contains(imperatives, first):
		return fmt.Sprintf("begins with %q: use the imperative", first)
	}
	return ""
}
