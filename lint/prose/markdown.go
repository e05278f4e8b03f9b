// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"

	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	gtext "github.com/yuin/goldmark/text"
)

var markdown = goldmark.New(goldmark.WithExtensions(extension.Table))

// markdownTexts returns the prose of a page: a text for each paragraph and list
// item. Headings, code blocks and HTML are no sentences. Tables are excluded
// too, but a cell of more than cellWords words is prose in a table's clothes.
func markdownTexts(file string, src []byte) []text {
	var out []text
	root := markdown.Parser().Parse(gtext.NewReader(src))
	_ = ast.Walk(root, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		if !entering {
			return ast.WalkContinue, nil
		}
		switch n.Kind() {
		case ast.KindParagraph, ast.KindTextBlock:
			out = append(out, text{file, lineOf(n, src), inline(n, src)})
			return ast.WalkSkipChildren, nil
		case extensionCell:
			if body := inline(n, src); countWords(body) > cellWords {
				out = append(out, text{file, lineOf(n, src), body})
			}
			return ast.WalkSkipChildren, nil
		}
		return ast.WalkContinue, nil
	})
	return out
}

// inline is the text of n's children. A code span counts as one word.
func inline(n ast.Node, src []byte) string {
	var b bytes.Buffer
	_ = ast.Walk(n, func(c ast.Node, entering bool) (ast.WalkStatus, error) {
		if !entering {
			return ast.WalkContinue, nil
		}
		switch c := c.(type) {
		case *ast.CodeSpan:
			b.WriteString("code")
			return ast.WalkSkipChildren, nil
		case *ast.AutoLink:
			b.WriteString("link")
			return ast.WalkSkipChildren, nil
		case *ast.Text:
			b.Write(c.Value(src))
			if c.SoftLineBreak() || c.HardLineBreak() {
				b.WriteByte(' ')
			}
		}
		return ast.WalkContinue, nil
	})
	return b.String()
}

// lineOf is the line on which n's text begins, from 1.
func lineOf(n ast.Node, src []byte) int {
	at := -1
	if lines := n.Lines(); lines != nil && lines.Len() > 0 {
		at = lines.At(0).Start
	} else {
		_ = ast.Walk(n, func(c ast.Node, entering bool) (ast.WalkStatus, error) {
			if t, ok := c.(*ast.Text); ok && at < 0 {
				at = t.Segment.Start
				return ast.WalkStop, nil
			}
			return ast.WalkContinue, nil
		})
	}
	if at < 0 {
		return 0
	}
	return bytes.Count(src[:at], []byte("\n")) + 1
}
