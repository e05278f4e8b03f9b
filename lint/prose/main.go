// SPDX-License-Identifier: Apache-2.0

// Command prose measures how the project's comments and pages read, against
// the bounds of docs/STYLE.md. It exits with 1 if a bound does not hold.
//
//	prose                     all measures, each with its bound
//	prose -packages           comments by folder, the most relative words first
//	prose -show feature/steer each relative word and headless clause below a folder or in a file
//	prose -long docs          each sentence of more than 26 words
//
// Other bounds of docs/STYLE.md have tests of their own: time.Sleep in
// internal/floors, help texts and log messages in lint/texts.
package main

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"

	east "github.com/yuin/goldmark/extension/ast"
)

// The bounds of docs/STYLE.md.
const (
	maxRelative = 1.8 // relative words in 100 words of comments
	maxHeadless = 0.5 // headless clauses in 1,000 words of comments
	maxMedian   = 14  // words a sentence of the pages
	maxP90      = 26

	cellWords = 25 // a longer table cell counts as a sentence
)

var extensionCell = east.KindTableCell

func main() {
	packages := flag.Bool("packages", false, "count comments by folder")
	show := flag.String("show", "", "list relative words in the comments and pages below this `folder` or in this file")
	long := flag.String("long", "", "list long sentences in the pages and comments below this `folder` or in this file")
	flag.Parse()
	ok, err := run(os.Stdout, *packages, *show, *long)
	if err != nil {
		fmt.Fprintln(os.Stderr, "prose:", err)
		os.Exit(2)
	}
	if !ok {
		os.Exit(1)
	}
}

func run(w io.Writer, packages bool, show, long string) (bool, error) {
	root, err := repository()
	if err != nil {
		return false, err
	}
	all, err := read(root)
	if err != nil {
		return false, err
	}
	switch {
	case packages:
		printPackages(w, all)
	case show != "":
		printMatches(w, all, show)
	case long != "":
		printLong(w, all, long)
	default:
		subjects, err := commitSubjects(root)
		if err != nil {
			return false, err
		}
		ok := printMeasures(w, all)
		return printSubjects(w, subjects) && ok, nil
	}
	return true, nil
}

// repository is the root of the working tree.
func repository() (string, error) {
	out, err := exec.Command("git", "rev-parse", "--show-toplevel").Output()
	if err != nil {
		return "", fmt.Errorf("find the repository: %w", exitError(err))
	}
	return strings.TrimSpace(string(out)), nil
}

// corpus is the prose of the repository by kind.
type corpus struct{ goCode, cCode, pages []text }

// read reads each file that git knows or would add.
func read(root string) (corpus, error) {
	cmd := exec.Command("git", "ls-files", "--cached", "--others", "--exclude-standard", "--", "*.go", "*.c", "*.h", "*.md")
	cmd.Dir = root
	list, err := cmd.Output()
	if err != nil {
		return corpus{}, fmt.Errorf("list files: %w", exitError(err))
	}
	var all corpus
	for _, name := range strings.Fields(string(list)) {
		src, err := os.ReadFile(filepath.Join(root, name))
		if errors.Is(err, os.ErrNotExist) {
			continue // deleted, not yet committed
		}
		if err != nil {
			return corpus{}, err
		}
		switch path.Ext(name) {
		case ".go":
			texts, err := goComments(name, src)
			if err != nil {
				return corpus{}, err
			}
			all.goCode = append(all.goCode, texts...)
		case ".c", ".h":
			all.cCode = append(all.cCode, cComments(name, src)...)
		case ".md":
			if !measured(name) {
				continue
			}
			all.pages = append(all.pages, markdownTexts(name, src)...)
		}
	}
	return all, nil
}

// measured reports whether a page's sentences count. The lab writes RESULTS.md,
// licenses are quoted, and help texts have a linter of their own.
func measured(name string) bool {
	return name != "docs/RESULTS.md" && !strings.HasPrefix(name, "LICENSES/") && !strings.HasPrefix(name, "lint/texts/")
}

func exitError(err error) error {
	var exit *exec.ExitError
	if errors.As(err, &exit) && len(exit.Stderr) > 0 {
		return fmt.Errorf("%w: %s", err, strings.TrimSpace(string(exit.Stderr)))
	}
	return err
}

func count(texts []text) figures {
	var f figures
	for _, t := range texts {
		f.add(t)
	}
	return f
}

// printMeasures prints each measure beside its bound and reports whether all hold.
func printMeasures(w io.Writer, all corpus) bool {
	goCode, cCode, pages := count(all.goCode), count(all.cCode), count(all.pages)
	ok := true
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	row := func(name string, value, bound float64, of string) {
		verdict := "ok"
		if value > bound {
			verdict, ok = "FAIL", false
		}
		fmt.Fprintf(t, "%s\t%.3g\t<= %g\t%s\t%s\n", name, value, bound, verdict, of)
	}
	fmt.Fprintln(t, "MEASURE\tVALUE\tBOUND\t\tOF")
	for _, c := range []struct {
		language string
		f        figures
	}{{"Go", goCode}, {"C", cCode}} {
		of := fmt.Sprintf("%d words", c.f.words)
		row(c.language+" comments: relative words per 100", c.f.relativePer100(), maxRelative, of)
		row(c.language+" comments: headless clauses per 1,000 words", c.f.headlessPer1000(), maxHeadless, of)
	}
	of := fmt.Sprintf("%d sentences", len(pages.lengths))
	row("README and docs: words a sentence, median", float64(pages.quantile(0.5)), maxMedian, of)
	row("README and docs: words a sentence, 90th percentile", float64(pages.quantile(0.9)), maxP90, of)
	row("README and docs: relative words per 100", pages.relativePer100(), maxRelative, fmt.Sprintf("%d words", pages.words))
	row("README and docs: headless clauses per 1,000 words", pages.headlessPer1000(), maxHeadless, fmt.Sprintf("%d words", pages.words))
	t.Flush()
	return ok
}

// printSubjects prints the commit subjects that break a rule and reports whether none does.
func printSubjects(w io.Writer, subjects []string) bool {
	bad := 0
	for _, s := range subjects {
		if problem := subjectProblem(s); problem != "" {
			fmt.Fprintf(w, "commit %q: %s\n", s, problem)
			bad++
		}
	}
	fmt.Fprintf(w, "%d of %d commit subjects since %s keep the rules\n", len(subjects)-bad, len(subjects), since)
	return bad == 0
}

func printPackages(w io.Writer, all corpus) {
	folders := map[string]*figures{}
	for _, t := range slices.Concat(all.goCode, all.cCode, all.pages) {
		dir := path.Dir(t.file)
		if path.Ext(t.file) == ".md" {
			dir = t.file
		}
		if folders[dir] == nil {
			folders[dir] = &figures{}
		}
		folders[dir].add(t)
	}
	names := make([]string, 0, len(folders))
	for n := range folders {
		names = append(names, n)
	}
	slices.SortFunc(names, func(a, b string) int {
		return cmp.Or(cmp.Compare(folders[b].relative, folders[a].relative), cmp.Compare(a, b))
	})
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "WORDS\tRELATIVE\tPER 100\tHEADLESS\tPER 1,000\tMEDIAN\tP90\tFOLDER OR PAGE")
	for _, n := range names {
		f := folders[n]
		fmt.Fprintf(t, "%d\t%d\t%.1f\t%d\t%.1f\t%d\t%d\t%s\n", f.words, f.relative, f.relativePer100(), f.headless, f.headlessPer1000(), f.quantile(0.5), f.quantile(0.9), n)
	}
	t.Flush()
}

// below selects the texts of a file, or of a folder and its subfolders.
func below(all corpus, where string) []text {
	where = strings.TrimSuffix(where, "/")
	return slices.DeleteFunc(slices.Concat(all.goCode, all.cCode, all.pages), func(t text) bool {
		return where != "." && t.file != where && !strings.HasPrefix(t.file, where+"/")
	})
}

func printMatches(w io.Writer, all corpus, where string) {
	for _, t := range below(all, where) {
		for _, s := range sentences(t.body) {
			relative, headless := len(relativePattern.FindAllString(s, -1)), headlessPattern.FindAllString(s, -1)
			if relative == 0 && len(headless) == 0 {
				continue
			}
			mark := ""
			if len(headless) > 0 {
				mark = fmt.Sprintf(" [headless: %s]", strings.TrimSpace(strings.Join(headless, ", ")))
			}
			fmt.Fprintf(w, "%s:%d: %s%s\n", t.file, t.line, strings.TrimSpace(s), mark)
		}
	}
	f := count(below(all, where))
	fmt.Fprintf(w, "%d words, relative %.2f per 100 (bound %g), headless %.2f per 1,000 (bound %g)\n", f.words, f.relativePer100(), maxRelative, f.headlessPer1000(), maxHeadless)
}

func printLong(w io.Writer, all corpus, where string) {
	for _, t := range below(all, where) {
		for _, s := range sentences(t.body) {
			if n := countWords(s); n > maxP90 {
				fmt.Fprintf(w, "%s:%d: %d words: %s\n", t.file, t.line, n, strings.TrimSpace(s))
			}
		}
	}
	f := count(below(all, where))
	fmt.Fprintf(w, "%d sentences, median %d words, 90th percentile %d\n", len(f.lengths), f.quantile(0.5), f.quantile(0.9))
}
