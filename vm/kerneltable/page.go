// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/weir-project/weir/host"
	"github.com/weir-project/weir/vm/objects"
)

// Beginnings of cells.
const (
	untested = "untested"
	failed   = "FAIL"
	absent   = "no"
)

// table is the results of all kernels.
type table struct {
	packages []Package // the whole list
	kernels  []Kernel
}

// column is a kernel, or a series without results.
type column struct {
	title, about string
	*Kernel
}

// sort orders the kernels by series.
func (t *table) sort() {
	index := func(k Kernel) int {
		for i, s := range series {
			if s.name == k.Series {
				return i
			}
		}
		return len(series)
	}
	slices.SortStableFunc(t.kernels, func(a, b Kernel) int {
		return cmp.Or(cmp.Compare(index(a), index(b)), cmp.Compare(a.Series, b.Series))
	})
}

func (t *table) columns() (out []column) {
	for _, s := range series {
		c := column{title: s.title, about: s.about}
		for i := range t.kernels {
			if t.kernels[i].Series == s.name {
				c.Kernel = &t.kernels[i]
			}
		}
		if s.name == "newest" && c.Kernel != nil {
			c.title = strings.Join(strings.SplitN(c.Release, ".", 3)[:min(2, strings.Count(c.Release, ".")+1)], ".")
		}
		out = append(out, c)
	}
	return out
}

// complete returns an error if a series has no results, or results are of several commits.
func (t *table) complete() error {
	var errs []error
	for i, c := range t.columns() {
		if c.Kernel == nil {
			errs = append(errs, fmt.Errorf("no result of %s", series[i].name))
		}
	}
	if commits := t.commits(); len(commits) > 1 {
		errs = append(errs, fmt.Errorf("results of several commits: %s", strings.Join(commits, ", ")))
	}
	return errors.Join(errs...)
}

func (t *table) commits() (out []string) {
	for _, k := range t.kernels {
		if !slices.Contains(out, k.Commit) {
			out = append(out, k.Commit)
		}
	}
	return out
}

// page returns the whole page.
func (t *table) page() string {
	columns := t.columns()
	var b strings.Builder
	date := slices.MaxFunc(t.kernels, func(a, b Kernel) int { return a.Time.Compare(b.Time) }).Time.Format("2006-01-02")
	fmt.Fprintf(&b, `# Kernels

%s wrote this page on %s. It ran commit %s on the kernels below, under QEMU ([vm/README](../vm/README.md)). %s

`, "`make kernels`", date, strings.Join(t.commits(), ", "), "`weir doctor` tests the kernel of a host in the same way.")
	writeTable(&b, []string{"column", "kernel", "release"}, func(add func(...string)) {
		for _, c := range columns {
			release := untested
			if c.Kernel != nil {
				release = cmp.Or(c.Release, failed+": did not boot")
			}
			add(c.title, c.about, release)
		}
	})
	b.WriteString(notRun)

	b.WriteString("\n## Features\n\n" + legend)
	heads := []string{"feature", "part"}
	for _, c := range columns {
		heads = append(heads, c.title)
	}
	writeTable(&b, heads, func(add func(...string)) {
		for _, r := range rows {
			cells := []string{r.feature, r.part}
			for _, c := range columns {
				cells = append(cells, t.cell(r, c))
			}
			add(cells...)
		}
	})

	b.WriteString("\n## Facilities\n\nThe needs of all features, as `weir doctor --json` reports them:\n\n")
	heads[0], heads[1] = "facility", "since Linux"
	writeTable(&b, heads, func(add func(...string)) { facilities(columns, add) })

	b.WriteString("\n## BPF objects\n\nLoaded uses of each object, of all its uses. A use not loaded has a missing need, named above.\n\n")
	heads = slices.Delete(heads, 1, 2)
	heads[0] = "object"
	writeTable(&b, heads, func(add func(...string)) { objectRows(columns, add) })

	b.WriteString("\n## Test packages\n\n")
	heads[0] = "package"
	writeTable(&b, heads, func(add func(...string)) {
		for _, p := range t.packages {
			cells := []string{"`" + p.Package + "`"}
			for _, c := range columns {
				cells = append(cells, verdict(p, c))
			}
			add(cells...)
		}
	})
	return b.String()
}

const legend = `| cell | meaning |
| --- | --- |
| yes | the programs load, and the tests pass |
| loads | the programs load; the matrix has no test of this part |
| no | a facility of the kernel is missing; the version is the first one with it |
| untested | not run |

`

const notRun = `
Kernels of Rocky Linux and Amazon Linux are not run: no mirror. Their usual folders beside Debian's archive do not exist there, and PyPI, npm and Maven Central list no such kernels.
`

// writeTable writes a table of Markdown.
func writeTable(b *strings.Builder, heads []string, fill func(add func(cells ...string))) {
	line := func(cells ...string) { fmt.Fprintf(b, "| %s |\n", strings.Join(cells, " | ")) }
	line(heads...)
	line(slices.Repeat([]string{"---"}, len(heads))...)
	fill(line)
}

// cell returns whether a kernel has a part of a feature.
func (t *table) cell(r row, c column) string {
	if c.Kernel == nil {
		return untested
	}
	var missing []objects.Missed
	state := ""
	for _, name := range r.jobs {
		switch i := slices.IndexFunc(c.Objects, func(o objects.Result) bool { return o.Job == name }); {
		case i < 0:
			state = cmp.Or(state, untested)
		case c.Objects[i].Result == objects.Failed:
			state = failed + ": does not load"
		default:
			missing = append(missing, c.Objects[i].Missing...)
		}
	}
	for _, check := range r.needs {
		switch f := finding(c, check); {
		case f == nil:
			state = cmp.Or(state, untested)
		case f.Level != "ok":
			missing = append(missing, objects.Missed{Need: check, Since: f.Since})
		}
	}
	if strings.HasPrefix(state, failed) {
		return state
	}
	if len(missing) > 0 {
		return reason(missing, c.Release)
	}
	for _, name := range r.packages {
		switch t.verdictOf(name, c) {
		case "ok":
		case failed:
			return failed + ": " + name
		default:
			state = cmp.Or(state, untested)
		}
	}
	if state == "" && len(r.packages) == 0 {
		return "loads"
	}
	return cmp.Or(state, "yes")
}

// reason names the need with the latest kernel. It omits the version if this kernel is not older.
func reason(missing []objects.Missed, release string) string {
	m := slices.MaxFunc(missing, func(a, b objects.Missed) int { return compareVersions(a.Since, b.Since) })
	if compareVersions(m.Since, release) > 0 {
		return fmt.Sprintf("%s: Linux %s (%s)", absent, m.Since, m.Need)
	}
	return fmt.Sprintf("%s: %s", absent, m.Need)
}

// compareVersions compares the first two numbers of kernel versions.
func compareVersions(a, b string) int {
	number := func(s string, i int) int {
		parts := strings.FieldsFunc(s, func(r rune) bool { return r < '0' || r > '9' })
		if i >= len(parts) {
			return 0
		}
		n, _ := strconv.Atoi(parts[i]) // digits only
		return n
	}
	return cmp.Or(cmp.Compare(number(a, 0), number(b, 0)), cmp.Compare(number(a, 1), number(b, 1)))
}

// finding returns doctor's finding about a need, or nil.
func finding(c column, check string) *host.Finding {
	if c.Kernel == nil || c.Doctor == nil {
		return nil
	}
	for i, f := range c.Doctor.Findings {
		if f.Check == check && (f.Since != "" || f.Optional) {
			return &c.Doctor.Findings[i]
		}
	}
	return nil
}

// facilities adds a row for each need that doctor probed anywhere.
func facilities(columns []column, add func(...string)) {
	since := map[string]string{}
	var names []string
	for _, c := range columns {
		if c.Kernel == nil || c.Doctor == nil {
			continue
		}
		for _, f := range c.Doctor.Findings {
			if _, ok := since[f.Check]; !ok && f.Since != "" {
				since[f.Check] = f.Since
				names = append(names, f.Check)
			}
		}
	}
	slices.SortStableFunc(names, func(a, b string) int { return compareVersions(since[a], since[b]) })
	for _, name := range names {
		cells := []string{name, since[name]}
		for _, c := range columns {
			switch f := finding(c, name); {
			case f == nil:
				cells = append(cells, untested)
			case f.Level == "ok":
				cells = append(cells, "yes")
			default:
				cells = append(cells, absent)
			}
		}
		add(cells...)
	}
}

// objectRows adds a row for each object.
func objectRows(columns []column, add func(...string)) {
	jobs := map[string]int{}
	var names []string
	for _, j := range objects.Jobs() {
		if j.Object == "" {
			continue
		}
		if jobs[j.Object]++; jobs[j.Object] == 1 {
			names = append(names, j.Object)
		}
	}
	for _, name := range names {
		cells := []string{"`" + name + "`"}
		for _, c := range columns {
			cells = append(cells, objectCell(name, jobs[name], c))
		}
		add(cells...)
	}
}

func objectCell(name string, jobs int, c column) string {
	if c.Kernel == nil {
		return untested
	}
	loaded, seen := 0, 0
	for _, o := range c.Objects {
		if o.Object != name {
			continue
		}
		seen++
		switch o.Result {
		case objects.Failed:
			return failed + ": " + o.Job
		case objects.Loaded:
			loaded++
		}
	}
	if seen < jobs {
		return untested
	}
	return fmt.Sprintf("%d of %d", loaded, jobs)
}

// verdictOf returns "ok", FAIL or untested for a package of the list.
func (t *table) verdictOf(name string, c column) string {
	i := slices.IndexFunc(t.packages, func(p Package) bool { return p.Package == name })
	if i < 0 {
		return untested
	}
	word, _, _ := strings.Cut(verdict(t.packages[i], c), ",")
	return word
}

// verdict returns the cell of a package. A run with other flags does not count.
func verdict(p Package, c column) string {
	if c.Kernel == nil {
		return untested
	}
	for _, ran := range c.Packages {
		if ran.Package != p.Package || ran.Flags != p.Flags {
			continue
		}
		var passed, bad, skipped int
		_, err := fmt.Sscanf(ran.Counts, "%d passed, %d failed, %d skipped", &passed, &bad, &skipped)
		switch {
		case ran.Verdict == failed:
			return failed
		case ran.Verdict != "ok" || err != nil:
			return untested
		case skipped > 0:
			return fmt.Sprintf("ok, %d skipped", skipped)
		}
		return "ok"
	}
	return untested
}
