-- SPDX-License-Identifier: Apache-2.0
-- Has tshark print, in one pass over a capture, which frames each of many display filters matches: a tap for each.
local number = 0
for filter in io.lines(os.getenv("WEIR_DISPLAY_FILTERS")) do
	number = number + 1
	local mine = number
	local ok, tap = pcall(Listener.new, "frame", filter)
	if ok then
		function tap.packet(pinfo)
			print("match", mine, pinfo.number)
		end
	else
		print("refused", mine, (tostring(tap):gsub("\n", " ")))
	end
end
