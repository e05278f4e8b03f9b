// SPDX-License-Identifier: Apache-2.0

package strictyaml

import "errors"

// Errors lists the mistakes returned by Decode, in the order of the file.
func Errors(err error) []*Error {
	var list []*Error
	walk(err, func(e error) {
		if e, ok := errors.AsType[*Error](e); ok {
			list = append(list, e)
		}
	})
	return list
}
