// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"io"
	"reflect"
	"time"

	fmt "github.com/weir-project/weir/internal/printable"
)

// PrintTables prints each list of a state as a table. Its columns are the fields of the list's elements tagged `table:"HEADING"`.
// A time is printed as the time since. Lists without such fields are left out.
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
		columns := tableColumns(v.Type().Field(i).Type.Elem())
		if len(columns) == 0 || v.Field(i).Len() == 0 {
			continue
		}
		if !first {
			fmt.Fprintln(w)
		}
		first = false
		printRows(w, v.Field(i), columns, now)
	}
}

// column is a field of a row with its heading.
type column struct {
	index   int
	heading string
}

func tableColumns(row reflect.Type) (out []column) {
	for i := range row.NumField() {
		if heading := row.Field(i).Tag.Get("table"); heading != "" {
			out = append(out, column{i, heading})
		}
	}
	return out
}

func printRows(w io.Writer, rows reflect.Value, columns []column, now time.Time) {
	cells := make([]any, len(columns))
	for i, c := range columns {
		cells[i] = c.heading
	}
	t := NewTable(w, cells...)
	for n := range rows.Len() {
		for i, c := range columns {
			cells[i] = rows.Index(n).Field(c.index).Interface()
			if at, ok := cells[i].(time.Time); ok {
				cells[i] = Ago(at, now)
			}
		}
		t.Row(cells...)
	}
	t.Flush()
}
