// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"io"
	"reflect"
	"slices"
	"strings"
	"time"

	fmt "github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/internal/terminal"
)

// PrintTables prints each slice of a state as a table, like PrintRows. It skips empty slices and slices without columns.
func PrintTables(w io.Writer, state any, now time.Time) {
	v := reflect.Indirect(reflect.ValueOf(state))
	if v.Kind() != reflect.Struct {
		return
	}
	first := true
	for i := range v.NumField() {
		if f := v.Type().Field(i); !f.IsExported() || f.Type.Kind() != reflect.Slice || f.Type.Elem().Kind() != reflect.Struct {
			continue
		}
		if len(tableColumns(v.Field(i))) == 0 || v.Field(i).Len() == 0 {
			continue
		}
		if !first {
			fmt.Fprintln(w)
		}
		first = false
		printRows(w, "", v.Field(i), now)
	}
}

// PrintRows prints a heading and one table row for each struct. The columns are the fields tagged `table:"HEADING"`, in
// their order. A time is printed as its age, "-" if zero. On a narrower terminal the widest columns follow below each row.
// Options follow the heading:
//
//	table:"DATA,bytes"         a size (uint64) in KiB, MiB and so on
//	table:"MEMBER,dash"        "-" in place of the zero value
//	table:"UNDECIDED,omitzero" no column if every row has the zero value
func PrintRows[R any](w io.Writer, rows []R, now time.Time) {
	printRows(w, "", reflect.ValueOf(rows), now)
}

// PrintIndentedRows prints rows indented below the line of their object.
func PrintIndentedRows[R any](w io.Writer, rows []R, now time.Time) {
	printRows(w, "  ", reflect.ValueOf(rows), now)
}

// column is a field of a row with its heading.
type column struct {
	index   int
	heading string
	option  string
}

// columnOptions are the options of the tag table, after the heading. "" is none.
var columnOptions = []string{"", "omitzero", "dash", "bytes"}

// tableColumns returns the columns of rows, a slice of structs.
func tableColumns(rows reflect.Value) (out []column) {
	row := rows.Type().Elem()
	for i := range row.NumField() {
		tag, ok := row.Field(i).Tag.Lookup("table")
		if !ok {
			continue
		}
		c := column{index: i}
		c.heading, c.option, _ = strings.Cut(tag, ",")
		if !slices.Contains(columnOptions, c.option) {
			panic(fmt.Sprintf("column %q: unknown option %q; a heading has no comma", tag, c.option))
		}
		if c.option != "omitzero" || !allZero(rows, i) {
			out = append(out, c)
		}
	}
	return out
}

func allZero(rows reflect.Value, field int) bool {
	for n := range rows.Len() {
		if !rows.Index(n).Field(field).IsZero() {
			return false
		}
	}
	return true
}

func printRows(w io.Writer, indent string, rows reflect.Value, now time.Time) {
	columns := tableColumns(rows)
	lines := make([][]string, 1+rows.Len())
	for _, c := range columns {
		lines[0] = append(lines[0], fmt.Text(c.heading))
		for n := range rows.Len() {
			lines[n+1] = append(lines[n+1], fmt.Text(fmt.Sprint(cellText(rows.Index(n).Field(c.index), c.option, now))))
		}
	}
	_, _ = io.WriteString(w, terminal.Table(terminal.Columns(w), indent, lines)) // ignore the error, like fmt.Fprint
}

// cellText returns the value printed in a cell.
func cellText(v reflect.Value, option string, now time.Time) any {
	if option == "dash" && v.IsZero() {
		return "-"
	}
	if option == "bytes" {
		return Bytes(v.Uint())
	}
	if at, ok := v.Interface().(time.Time); ok {
		return Ago(at, now)
	}
	return v.Interface()
}
