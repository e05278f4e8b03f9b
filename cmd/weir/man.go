// SPDX-License-Identifier: Apache-2.0

//go:build man

package main

import (
	"os"
	"strconv"
	"time"

	"github.com/spf13/cobra/doc"

	fmt "github.com/weir-project/weir/internal/printable"
)

// A weir built with this tag writes the man pages of its commands into a directory and ends: weir man DIR. The product
// itself needs no generator.
func init() {
	if len(os.Args) != 3 || os.Args[1] != "man" {
		return
	}
	c := newCommand()
	c.DisableAutoGenTag = true // it holds the date
	header := &doc.GenManHeader{Section: "8", Source: "weir " + version, Manual: "weir", Date: manDate()}
	if err := doc.GenManTree(c, header, os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "weir man:", err)
		os.Exit(exitFailed)
	}
	os.Exit(0)
}

// manDate is the date of the release (SOURCE_DATE_EPOCH, seconds since 1970), so two builds give the same pages.
func manDate() *time.Time {
	seconds, _ := strconv.ParseInt(os.Getenv("SOURCE_DATE_EPOCH"), 10, 64)
	t := time.Unix(seconds, 0).UTC()
	return &t
}
