// SPDX-License-Identifier: Apache-2.0

// Command kerneltable writes docs/KERNELS.md, the table of features by kernel, from the results of vm/run:
//
//	kerneltable record SERIES COMMIT DIR >RESULT.json   one kernel's output as JSON; vm/run calls it
//	kerneltable write [-complete] RESULTS PAGE          the page from the results in a folder
//	kerneltable check PAGE                              fail if the page has untested or failed cells
//
// With -complete, write fails in the same cases, and if a series is missing or the results are of several commits.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "kerneltable:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 0 {
		return errors.New("want record, write or check")
	}
	flags := flag.NewFlagSet(args[0], flag.ContinueOnError)
	complete := flags.Bool("complete", false, "write: fail if anything is untested or failed")
	list := flags.String("packages", "vm/packages", "write: the list of test packages")
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	switch rest := flags.Args(); {
	case args[0] == "record" && len(rest) == 3:
		k, err := record(rest[0], rest[1], rest[2], time.Now())
		if err != nil {
			return err
		}
		e := json.NewEncoder(os.Stdout)
		e.SetIndent("", "\t")
		return e.Encode(k)
	case args[0] == "write" && len(rest) == 2:
		return write(rest[0], rest[1], *list, *complete)
	case args[0] == "check" && len(rest) == 1:
		text, err := os.ReadFile(rest[0])
		if err != nil {
			return err
		}
		return check(string(text))
	}
	return fmt.Errorf("wrong arguments of %s", args[0])
}

func write(results, page, list string, complete bool) error {
	text, err := os.ReadFile(list)
	if err != nil {
		return err
	}
	t := table{packages: parseList(string(text))}
	files, err := filepath.Glob(filepath.Join(results, "*.json"))
	if err != nil {
		return err
	}
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		var k Kernel
		if err := json.Unmarshal(text, &k); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		t.kernels = append(t.kernels, k)
	}
	if len(t.kernels) == 0 {
		return fmt.Errorf("no results in %s: run make kernels", results)
	}
	t.sort()
	out := t.page()
	if err := os.WriteFile(page, []byte(out), 0o644); err != nil {
		return err
	}
	if !complete {
		return nil
	}
	return errors.Join(t.complete(), check(out))
}

// check returns an error if a cell of a page is untested or failed.
func check(page string) error {
	var found []string
	rows := 0
	for line := range strings.Lines(page) {
		if !strings.HasPrefix(line, "| ") {
			continue
		}
		rows++
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		for _, c := range cells[1:] {
			if c := strings.TrimSpace(c); c == untested || strings.HasPrefix(c, failed) {
				found = append(found, strings.TrimSpace(cells[0])+" is "+c)
			}
		}
	}
	if rows < 10 {
		return errors.New("this is no page of kerneltable")
	}
	found = slices.Compact(found)
	if len(found) > 0 {
		return fmt.Errorf("the table is incomplete: %s", strings.Join(found, "; "))
	}
	return nil
}
